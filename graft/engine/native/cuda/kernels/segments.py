"""`decode` in the order of positions: its bits are those of the prompt's kernel and of the learner's.

    B sequences, H query heads in K groups of G, d head size, slots: segments of the longest sequence

A segment of a sequence is always computed by one program, which writes its softmax (weighted values,
maximum, sum) to the segment's own slot; `_merge` then goes over the slots from first to last. Which program
computes which segment changes nothing. As in `decode`, segments that siblings share are work items, read
once for all of them; those after them are the tail of a row, whose n programs take every n-th.

A prompt seldom ends with a segment. The pages that siblings share of the first segment of their tails are
items too, which leave an unfinished softmax in the segment's slot. A second launch goes on from there: it
computes the first segments of all tails, and the first launch everything else.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.engine.native.kv.pages import PAD_PAGE
from graft.engine.native.kv.sharing import Ints, PageSharing, find_sharing, siblings_first
from graft.models.kernels.path_attention import (
    empty_segment,
    fold_block,
    merge_segment,
    sizes,
)
from graft.models.tree.path_blocks import BLOCK, SEGMENT

NUM_WARPS, NUM_STAGES = 4, 2

MIN_SAVED_PAGES = 256
"""Reads that beginnings of tails must save: their second launch takes about as long."""


# numbers that change from batch to batch are no constants: each would be compiled anew
@triton.jit(do_not_specialize=["table_stride", "num_items", "splits", "slots", "skipped", "most"])
def _attend(
    q,  # [B, H, d]
    k_pool,  # [pages, K, BLOCK, d]
    v_pool,
    table,  # [B, P]
    table_stride,
    lengths,  # [B] tokens to attend to, the new one included; 0: an unused row
    tails,  # [B] first segment of the row's tail
    begun,  # [B] pages of it that its slot has already
    items,  # [n, 5] first row, rows, first segment, last segment + 1, pages of it (0: all); zeros: unused
    num_items,  # as many programs, which start first; the others work on tails
    splits,  # programs of a tail
    skipped,  # segments at the beginning of a tail
    most,  # segments of a tail
    slots,
    partial,  # [B, slots, H, d] float32
    stats,  # [B, slots, H, 2] float32: maximum, sum
    SCALE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    BLOCK: tl.constexpr, SEGMENT: tl.constexpr, ONES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    work = tl.program_id(1)
    if work >= num_items:
        work -= num_items
        row = work // splits
        rows = 1
        length = tl.load(lengths + row).to(tl.int32)
        tail = tl.load(tails + row).to(tl.int32)
        known = tl.load(begun + row).to(tl.int32)
        start = tail + skipped + work % splits
        stop = tl.minimum(tl.cdiv(length, SEGMENT * BLOCK), tail + most)
        step = splits
    else:
        item = items + work * 5
        row = tl.load(item).to(tl.int32)
        rows = tl.load(item + 1).to(tl.int32)
        start = tl.load(item + 2).to(tl.int32)
        stop = tl.load(item + 3).to(tl.int32)
        pages_of_it = tl.load(item + 4).to(tl.int32)
        length = stop * (SEGMENT * BLOCK)  # shared segments are full
        if pages_of_it != 0:
            length = (start * SEGMENT + pages_of_it) * BLOCK
        step = 1
        tail = -1
        known = 0
    tile_row = tl.arange(0, ROWS)
    sequence = (row + tile_row // GROUP).to(tl.int64)
    query_head = head * GROUP + tile_row % GROUP
    is_used = tile_row < rows * GROUP
    column = tl.arange(0, W)
    in_size = (column < D)[None, :]
    inside = is_used[:, None] & in_size
    at = (sequence * (HEADS * GROUP) + query_head)[:, None] * D + column[None, :]
    query = tl.load(q + at, mask=inside, other=0.0)
    key = tl.arange(0, BLOCK)
    tile = key[:, None] * D + column[None, :]
    pages = table + row.to(tl.int64) * table_stride
    for segment in tl.range(start, stop, step):
        first = segment * SEGMENT
        at_slot = (sequence * slots + segment) * (HEADS * GROUP) + query_head
        at_acc = at_slot[:, None] * D + column[None, :]
        if (segment == tail) & (known != 0):
            first += known
            top = tl.load(stats + at_slot * 2, mask=is_used, other=float("-inf"))
            total = tl.load(stats + at_slot * 2 + 1, mask=is_used, other=0.0)
            sums = total[:, None] + tl.zeros([ROWS, ONES], tl.float32)
            acc = tl.load(partial + at_acc, mask=inside, other=0.0)
        else:
            top, sums, acc = empty_segment(ROWS, ONES, W)
        last = tl.minimum((segment + 1) * SEGMENT, tl.cdiv(length, BLOCK))
        for number in tl.range(first, last):
            page = tl.load(pages + number).to(tl.int64)
            base = (page * HEADS + head) * (BLOCK * D)
            is_past = number * BLOCK + key < length
            if D == W:
                keys, values = tl.load(k_pool + base + tile), tl.load(v_pool + base + tile)
            else:
                keys = tl.load(k_pool + base + tile, mask=in_size, other=0.0)
                values = tl.load(v_pool + base + tile, mask=in_size, other=0.0)
            top, sums, acc = fold_block(
                top, sums, acc, query, keys, values, is_past[None, :], SCALE
            )
        tl.store(partial + at_acc, acc, mask=inside)
        tl.store(stats + at_slot * 2, top, mask=is_used)
        tl.store(stats + at_slot * 2 + 1, tl.max(sums, 1), mask=is_used)  # of equal columns


@triton.jit(do_not_specialize=["slots"])
def _merge(
    partial, stats, lengths, out, slots,
    HEADS: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    SPAN: tl.constexpr, MERGED_HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * MERGED_HEADS + tl.arange(0, MERGED_HEADS)
    column = tl.arange(0, W)
    is_head = head < HEADS
    inside = is_head[:, None] & (column < D)[None, :]
    top, total, acc = empty_segment(MERGED_HEADS, 1, W)
    used = tl.cdiv(tl.load(lengths + row).to(tl.int32), SPAN)
    for slot in tl.range(0, used):
        at_slot = (row * slots + slot) * HEADS + head
        its_top = tl.load(stats + at_slot * 2, mask=is_head, other=float("-inf"))
        its_total = tl.load(stats + at_slot * 2 + 1, mask=is_head, other=0.0)[:, None]
        at_acc = at_slot[:, None] * D + column[None, :]
        its_acc = tl.load(partial + at_acc, mask=inside, other=0.0)
        top, total, acc = merge_segment(top, total, acc, its_top, its_total, its_acc)
    total = tl.where(total == 0, 1.0, total)  # an unused row
    at = (row * HEADS + head)[:, None] * D + column[None, :]
    tl.store(out + at, (acc / total).to(out.dtype.element_ty), mask=inside)


def share_segments(table: Ints, group: int, kv_heads: int) -> PageSharing:
    """`find_sharing` of whole segments, and of beginnings: tails and items count segments instead of pages,
    and `slots` are the pages of each tail that items have begun with."""
    padding = -table.shape[1] % SEGMENT
    table = np.pad(table, ((0, 0), (0, padding)), constant_values=PAD_PAGE)
    order = siblings_first(table)
    # who shares the last page of a segment shares all of it
    sharing = find_sharing(table[:, SEGMENT - 1 :: SEGMENT], group, kv_heads, 0, order, (1, 2))
    sharing.items[:, 4] = 0  # whole segments
    most = max(sharing.tile_rows // group, 1)
    begun, sharing.slots = _begun(table[order], sharing.tails, most)
    sharing.items = np.concatenate([sharing.items, begun])
    return sharing


def _begun(table: Ints, tails: Ints, most: int) -> tuple[Ints, Ints]:
    """Items, of up to `most` rows, for the pages that neighbours share of the first segment of their
    tails; and how many pages each row has in them."""
    columns = np.minimum(tails[:, None] * SEGMENT + np.arange(SEGMENT - 1), table.shape[1] - 1)
    pages = np.take_along_axis(table, columns, axis=1)
    same = (pages[1:] == pages[:-1]) & (pages[1:] != PAD_PAGE)
    is_same = (tails[1:] == tails[:-1]) & same[:, 0]
    common = np.minimum.accumulate(same, axis=1).sum(axis=1)
    counts = np.zeros(len(table), dtype=np.int64)
    items: list[tuple[int, int, int, int, int]] = []
    saved = 0
    edges = [0, *(np.flatnonzero(~is_same) + 1).tolist(), len(table)]
    for first, stop in pairwise(edges):
        if stop - first < 2:
            continue
        count, tail = int(common[first : stop - 1].min()), int(tails[first])
        counts[first:stop] = count
        saved += count * (stop - first - 1)
        items += [
            (row, min(most, stop - row), tail, tail + 1, count) for row in range(first, stop, most)
        ]
    if saved < MIN_SAVED_PAGES:
        return np.zeros((0, 5), dtype=np.int64), np.zeros_like(counts)
    return np.array(items, dtype=np.int64), counts


def num_segments(length: int) -> int:
    """Of a sequence."""
    return -(-length // (SEGMENT * BLOCK))


def decode_segments(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    lengths: Tensor,
    tails: Tensor,
    begun: Tensor,
    items: Tensor,
    *,
    has_begun: bool,
    splits: int,
    slots: int,
    tile_rows: int,
    space: tuple[Tensor, Tensor],
) -> Tensor:
    """Attention of q [B,H,d], see the module; `space` is `decode.scratch` of `slots` per row.

    has_begun   some of the items are beginnings of tails
    """
    batch, heads, _ = q.shape
    kv_heads = k_pool.shape[1]
    partial, stats = space
    q = q.contiguous()
    out = torch.empty_like(q)
    shared = sizes(q, kv_heads)
    every = 1 << 20
    launches = (
        [(items, splits, 1, every), (items[:0], 1, 0, 1)]
        if has_begun
        else [(items, splits, 0, every)]
    )
    for listed, programs, skipped, most in launches:
        _attend[(kv_heads, len(listed) + batch * programs)](
            q, k_pool, v_pool, table, table.stride(0), lengths, tails, begun, listed, len(listed),
            programs, skipped, most, slots, partial, stats, HEADS=kv_heads, ROWS=tile_rows, **shared,
            num_warps=NUM_WARPS, num_stages=NUM_STAGES,
        )  # fmt: skip
    merged = min(triton.next_power_of_2(heads), 4)
    _merge[(batch, triton.cdiv(heads, merged))](
        partial, stats, lengths, out, slots, HEADS=heads, D=shared["D"], W=shared["W"],
        SPAN=BLOCK * SEGMENT, MERGED_HEADS=merged, num_warps=4,
    )  # fmt: skip
    return out
