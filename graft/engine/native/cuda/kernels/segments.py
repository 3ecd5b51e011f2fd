"""`decode` in the order of positions: its bits are those of the prompt's kernel and of the learner's.

    B sequences, H query heads in K groups of G, d head size, slots: segments of the longest sequence

A segment of a sequence is always computed by one program, which writes its softmax (weighted values,
maximum, sum) to the segment's own slot; `_merge` then goes over the slots from first to last. Which program
computes which segment changes nothing. As in `decode`, segments that siblings share are work items, read
once for all of them; those after them are the tail of a row, whose n programs take every n-th.

A prompt seldom ends with a segment. Where siblings share the first pages of a segment it is an item too: it
adds the shared pages for all of them, then the pages of each sibling in turn, which the others do not see.

    segment of 4 pages, 2 rows     row 0   1 2 3 | 4      item   1 2 3 for both, 4 for row 0, 5 for row 1
                                   row 1   1 2 3 | 5

In the same way one program computes the tails of a few neighbours, where these are short. With a window
segments and pages that none of a program's rows sees are skipped, and `_merge` begins with the first that
its row sees.
`kv.segment_sharing` decides what is an item, and how many tails a program has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.engine.native.cuda.kernels.code_pairs import fold_pairs
from graft.engine.native.cuda.kernels.decode import first_position
from graft.models.kernels.interval_kernels import sink_weight
from graft.models.kernels.launch import after_previous, chained
from graft.models.kernels.path_attention import (
    empty_segment,
    fold_block,
    merge_segment,
    sizes,
)
from graft.models.tree.path_blocks import BLOCK, SEGMENT

NUM_WARPS = 4
NUM_STAGES = 3
"""Pages that are on their way from memory, and the one that is added."""
LARGE_TILE_STAGES = 2
"""The same of tiles of 64 rows, which need the memory for themselves."""


# numbers that change from batch to batch are no constants: each would be compiled anew
@triton.jit(
    do_not_specialize=["table_stride", "batch", "num_items", "splits", "tail_rows", "slots"]
)
def _attend(
    q,  # [B, H, d]
    k_pool,  # [pages, K, BLOCK, d]
    v_pool,  # of codes: pairs of them
    k_scales,  # [pages, K, BLOCK] of pools that hold codes (`models.kv_slots`), or None
    v_scales,
    table,  # [B, P]
    table_stride,
    lengths,  # [B] tokens to attend to, the new one included; 0: an unused row
    tails,  # [B] first segment of the row's tail
    items,  # [n, 5] first row, rows, first segment, last segment + 1, pages that all rows share
    batch,
    num_items,  # as many programs, which start first; the others work on tails
    splits,  # programs of a tail
    tail_rows,  # rows whose tails one program computes
    slots,
    partial,  # [B, slots, H, d] float32
    stats,  # [B, slots, H, 2] float32: maximum, sum
    SCALE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    BLOCK: tl.constexpr, SEGMENT: tl.constexpr, ONES: tl.constexpr, ROWS: tl.constexpr,
    NUM_STAGES: tl.constexpr, WINDOW: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        after_previous()
    head = tl.program_id(0)
    work = tl.program_id(1)
    if work >= num_items:
        work -= num_items
        row = work // splits * tail_rows
        rows = tl.minimum(tail_rows, batch - row)
        first = tl.load(tails + row)
        # not `tl.min` of a vector: the compiler does not fetch pages ahead then
        for other in tl.range(row + 1, row + rows):
            first = tl.minimum(first, tl.load(tails + other))
        start = first.to(tl.int32) + work % splits
        stop = 1 << 20
        shared = 0
        step = splits
        is_tail = 1
    else:
        item = items + work * 5
        row = tl.load(item).to(tl.int32)
        rows = tl.load(item + 1).to(tl.int32)
        start = tl.load(item + 2).to(tl.int32)
        stop = tl.load(item + 3).to(tl.int32)
        shared = tl.load(item + 4).to(tl.int32)
        step = 1
        is_tail = 0
    tile_row = tl.arange(0, ROWS)
    member = tile_row // GROUP
    longest = tl.max(tl.load(lengths + row + tile_row, mask=tile_row < rows, other=0), 0)
    longest = tl.cdiv(longest.to(tl.int32), BLOCK)  # pages
    stop = tl.minimum(stop, tl.cdiv(longest, SEGMENT))
    sequence = (row + member).to(tl.int64)
    query_head = head * GROUP + tile_row % GROUP
    is_used = tile_row < rows * GROUP
    if WINDOW:
        oldest = tl.load(lengths + sequence, mask=is_used, other=0).to(tl.int32) - WINDOW
        first_page = first_position(lengths, row, rows, WINDOW) // BLOCK
        start += tl.cdiv(tl.maximum(first_page // SEGMENT - start, 0), step) * step
    tail = tl.load(tails + row + member, mask=is_used, other=1 << 20).to(tl.int32) * is_tail
    column = tl.arange(0, W)
    in_size = (column < D)[None, :]
    inside = is_used[:, None] & in_size
    at = (sequence * (HEADS * GROUP) + query_head)[:, None] * D + column[None, :]
    query = tl.load(q + at, mask=inside, other=0.0)
    key = tl.arange(0, BLOCK)
    tile = key[:, None] * D + column[None, :]
    PAIRED: tl.constexpr = 1 if k_scales is None else 2
    column_v = tl.arange(0, W // PAIRED)
    tile_v = key[:, None] * (D // PAIRED) + column_v[None, :]
    for segment in tl.range(start, stop, step):
        pages = tl.minimum(longest - segment * SEGMENT, SEGMENT)
        count = shared + rows * (pages - shared)
        whose, place, apart = 0, 0, shared  # the first page that rows do not share
        if WINDOW:
            place = tl.minimum(tl.maximum(first_page - segment * SEGMENT, 0), pages - 1)
            apart = tl.maximum(shared, place)
            count = apart - place + rows * (pages - apart)
        at_pages = table + row.to(tl.int64) * table_stride + segment * SEGMENT
        top, sums, acc = empty_segment(ROWS, ONES, W // PAIRED)
        odd = acc
        # the number of the next page is read a turn ahead, so that pages can be fetched ahead
        page = tl.load(at_pages + place)
        for _ in tl.range(0, count, num_stages=NUM_STAGES):
            # shared pages are full, and all rows see them
            is_shared = place < shared
            length = tl.load(lengths + row + whose).to(tl.int32)
            # before its tail an item has computed the segment
            its_tail = tl.load(tails + row + whose).to(tl.int32) * is_tail
            length = tl.where(its_tail <= segment, length, 0)
            position = (segment * SEGMENT + place) * BLOCK
            is_past = position + key < tl.where(is_shared, position + BLOCK, length)
            if WINDOW:
                is_past &= position + key >= tl.where(is_shared, 0, length - WINDOW)
            is_its = member == tl.where(is_shared, member, whose)
            base = (page.to(tl.int64) * HEADS + head) * (BLOCK * D)
            # what is not there yet costs no memory traffic
            is_read = is_past[:, None] if D == W else is_past[:, None] & in_size
            keys = tl.load(k_pool + base + tile, mask=is_read, other=0)
            if PAIRED == 2 and D != W:
                is_read = is_past[:, None] & (column_v < D // PAIRED)[None, :]
            values = tl.load(v_pool + base // PAIRED + tile_v, mask=is_read, other=0)
            if k_scales is not None:
                row_of_key = base // D + key
                k_scale = tl.load(k_scales + row_of_key, mask=is_past, other=0)
                v_scale = tl.load(v_scales + row_of_key, mask=is_past, other=0)
            place += 1
            whose = tl.where(place == pages, tl.minimum(whose + 1, rows - 1), whose)
            place = tl.where(place == pages, tl.minimum(apart, pages - 1), place)
            page = tl.load(at_pages + whose.to(tl.int64) * table_stride + place)
            is_seen = is_past[None, :] & is_its[:, None]
            if WINDOW:
                is_seen &= position + key[None, :] >= oldest[:, None]
            if k_scales is None:
                top, sums, acc = fold_block(top, sums, acc, query, keys, values, is_seen, SCALE)
            else:
                top, sums, acc, odd = fold_pairs(
                    top, sums, acc, odd, query, keys, values, is_seen, SCALE, k_scale, v_scale
                )
        if PAIRED == 2:
            acc = tl.interleave(acc, odd)
        at_slot = (sequence * slots + segment) * (HEADS * GROUP) + query_head
        is_mine = is_used & (tail <= segment)
        at_acc = at_slot[:, None] * D + column[None, :]
        tl.store(partial + at_acc, acc, mask=is_mine[:, None] & in_size)
        tl.store(stats + at_slot * 2, top, mask=is_mine)
        tl.store(stats + at_slot * 2 + 1, tl.max(sums, 1), mask=is_mine)  # of equal columns


@triton.jit(do_not_specialize=["slots"])
def _merge(
    partial, stats, lengths, out, sinks, slots,
    HEADS: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    SPAN: tl.constexpr, WINDOW: tl.constexpr, MERGED_HEADS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        after_previous()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * MERGED_HEADS + tl.arange(0, MERGED_HEADS)
    column = tl.arange(0, W)
    is_head = head < HEADS
    inside = is_head[:, None] & (column < D)[None, :]
    top, total, acc = empty_segment(MERGED_HEADS, 1, W)
    length = tl.load(lengths + row).to(tl.int32)
    first = 0
    if WINDOW:
        first = tl.maximum(length - WINDOW, 0) // SPAN
    for slot in tl.range(first, tl.cdiv(length, SPAN)):
        at_slot = (row * slots + slot) * HEADS + head
        its_top = tl.load(stats + at_slot * 2, mask=is_head, other=float("-inf"))
        its_total = tl.load(stats + at_slot * 2 + 1, mask=is_head, other=0.0)[:, None]
        at_acc = at_slot[:, None] * D + column[None, :]
        its_acc = tl.load(partial + at_acc, mask=inside, other=0.0)
        top, total, acc = merge_segment(top, total, acc, its_top, its_total, its_acc)
    if sinks is not None:
        total += sink_weight(top, tl.load(sinks + head, mask=is_head, other=0.0))[:, None]
    total = tl.where(total == 0, 1.0, total)  # an unused row
    at = (row * HEADS + head)[:, None] * D + column[None, :]
    tl.store(out + at, (acc / total).to(out.dtype.element_ty), mask=inside)


def decode_segments(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    lengths: Tensor,
    tails: Tensor,
    items: Tensor,
    *,
    splits: int,
    slots: int,
    tile_rows: int,
    space: tuple[Tensor, Tensor],
    tail_rows: int = 1,
    window: int = 0,
    sinks: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
) -> Tensor:
    """Attention of q [B,H,d], see the module; `space` is `decode.scratch` of `slots` per row. Pools
    of codes have `scales`."""
    batch, heads, _ = q.shape
    kv_heads = k_pool.shape[1]
    partial, stats = space
    q = q.contiguous()
    out = torch.empty_like(q)
    shared = sizes(q, kv_heads)
    stages = NUM_STAGES if tile_rows < 64 else LARGE_TILE_STAGES
    if scales[0] is not None:
        v_pool = v_pool.view(torch.int16)
    _attend[(kv_heads, len(items) + triton.cdiv(batch, tail_rows) * splits)](
        q, k_pool, v_pool, *scales, table, table.stride(0), lengths, tails, items, batch, len(items), splits,
        tail_rows, slots, partial, stats, HEADS=kv_heads, ROWS=tile_rows, NUM_STAGES=stages, **shared,
        WINDOW=window, num_warps=NUM_WARPS, **chained(q.device),
    )  # fmt: skip
    merged = min(triton.next_power_of_2(heads), 4)
    _merge[(batch, triton.cdiv(heads, merged))](
        partial, stats, lengths, out, sinks, slots, HEADS=heads, D=shared["D"], W=shared["W"],
        SPAN=BLOCK * SEGMENT, WINDOW=window, MERGED_HEADS=merged, num_warps=4, **chained(q.device),
    )  # fmt: skip
    return out
