"""Attention of one new token per sequence over its pages; pages that siblings share are read once.

    B sequences, H query heads in K groups of G, d head size, slots: partial results per sequence

The pages of a sequence are those it shares with others, then a tail of its own:

    two samples of one prompt      pages 1 2 3 | 4 5        work item: pages 1-3 for both rows
                                   pages 1 2 3 | 6          work items: 4-5 and 6, one row each

A work item is a span of pages and the rows that attend to it: (first row, rows, first page, last page
+ 1, slot). The queries of its rows, G each, are one tile of a matrix product, so a page is read from
memory once for all of them. Every item writes a partial softmax (weighted values, maximum, sum) to
its slot of every row; `_merge` combines the slots of a row. Tails need no items: each is split into
SPLITS parts where few sequences would leave the device idle, and its length is read on the device, so
that one captured launch serves every step of a burst. With a window pages that no row of a program sees are
skipped.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.models.device import has_large_shared_memory
from graft.models.kernels.interval_kernels import sink_weight

ITEM_FIELDS = 5
LOG2_E = math.log2(math.e)


@triton.jit
def fold(top, total, acc, score, values, WINDOW: tl.constexpr):
    """Add one more page to a row's maximum, sum and weighted values.

    score [rows, keys] as exponents of 2, -inf where masked; values [keys, d].
    """
    # an integer: weights then round alike however the keys are split, here and in the learner
    new_top = tl.maximum(top, tl.ceil(tl.max(score, 1)))
    base = new_top
    if WINDOW:  # a row may see no key of its first pages, and -inf - -inf would be NaN
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    # rounded before they are summed, so that the result is an exact weighted average
    weight = tl.exp2(score - base[:, None]).to(values.dtype)
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weight.to(tl.float32), 1)
    acc = tl.dot(weight, values, acc * fade[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def first_position(lengths, row, rows, WINDOW: tl.constexpr):
    """The first position in the window of any of these rows; an unused row has none.

    Not `tl.min` of a vector: the compiler does not fetch pages ahead then.
    """
    first = 1 << 30
    for other in tl.range(row, row + rows):
        length = tl.load(lengths + other).to(tl.int32)
        first = tl.minimum(first, tl.where(length == 0, 1 << 30, tl.maximum(length - WINDOW, 0)))
    return first


@triton.jit(do_not_specialize=["table_stride", "tails_count", "scale"])
def _attend(
    q,  # [B, H, d]
    k_pool,  # [pages, K, page, d]
    v_pool,
    table,  # [B, P]
    table_stride,
    lengths,  # [B] tokens to attend to, the new one included; 0: an unused row
    tails,  # [B] first page of the row's tail
    items,  # [n, 5]; all zero: unused
    tails_count,  # B * SPLITS programs work on tails, the rest on items
    scale,
    partial,  # [B, SLOTS, H, d] float32
    stats,  # [B, SLOTS, H, 2] float32: maximum, sum
    out,  # [B, H, d], written where there is one slot only
    sinks,  # [H] or None
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_2: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    head = tl.program_id(0)
    work = tl.program_id(1)
    if work < tails_count:
        row = work // SPLITS
        slot = work % SPLITS
        length = tl.load(lengths + row).to(tl.int32)
        first = tl.load(tails + row).to(tl.int32)
        if WINDOW:
            first = tl.maximum(first, (length - WINDOW) // PAGE)
        last = tl.cdiv(length, PAGE)
        share = tl.cdiv(tl.maximum(last - first, 0), SPLITS)
        start = first + slot * share
        stop = tl.minimum(start + share, last)
        rows = 1
    else:
        item = items + (work - tails_count) * 5
        row = tl.load(item).to(tl.int32)
        rows = tl.load(item + 1).to(tl.int32)
        start = tl.load(item + 2).to(tl.int32)
        stop = tl.load(item + 3).to(tl.int32)
        slot = tl.load(item + 4).to(tl.int32)
        length = stop * PAGE  # shared pages are full
    tile_row = tl.arange(0, ROWS)
    sequence = row + tile_row // GROUP
    query_head = head * GROUP + tile_row % GROUP
    is_used = tile_row < rows * GROUP
    column = tl.arange(0, SIZE_2)
    in_size = column < SIZE
    at = (sequence.to(tl.int64) * (HEADS * GROUP) + query_head)[:, None] * SIZE + column[None, :]
    inside = is_used[:, None] & in_size[None, :]
    query = tl.load(q + at, mask=inside, other=0.0)
    key = tl.arange(0, PAGE)
    tile = key[:, None] * SIZE + column[None, :]
    pages = table + row.to(tl.int64) * table_stride
    if WINDOW:
        oldest = tl.load(lengths + sequence, mask=is_used, other=0).to(tl.int32) - WINDOW
        start = tl.maximum(start, first_position(lengths, row, rows, WINDOW) // PAGE)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, SIZE_2], tl.float32)
    for index in tl.range(start, stop, num_stages=STAGES):
        page = tl.load(pages + index).to(tl.int64)
        base = (page * HEADS + head) * (PAGE * SIZE)
        if SIZE == SIZE_2:
            keys = tl.load(k_pool + base + tile)
        else:
            keys = tl.load(k_pool + base + tile, mask=in_size[None, :], other=0.0)
        score = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        is_past = index * PAGE + key < length
        score = tl.where(is_past[None, :], score, float("-inf"))
        if WINDOW:
            is_near = index * PAGE + key[None, :] >= oldest[:, None]
            score = tl.where(is_near, score, float("-inf"))
        if SIZE == SIZE_2:
            values = tl.load(v_pool + base + tile)
        else:
            values = tl.load(v_pool + base + tile, mask=in_size[None, :], other=0.0)
        # the rest of a half-filled page may hold NaN, which weight 0 would not cancel
        values = tl.where(is_past[:, None], values, 0.0)
        top, total, acc = fold(top, total, acc, score, values, WINDOW)
    if SLOTS == 1:
        if sinks is not None:
            total += sink_weight(top, tl.load(sinks + query_head, mask=is_used, other=0.0))
        result = acc / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
    else:
        at_slot = (sequence.to(tl.int64) * SLOTS + slot) * (HEADS * GROUP) + query_head
        tl.store(partial + at_slot[:, None] * SIZE + column[None, :], acc, mask=inside)
        tl.store(stats + at_slot * 2, top, mask=is_used)
        tl.store(stats + at_slot * 2 + 1, total, mask=is_used)


@triton.jit
def _merge(
    partial,
    stats,
    shared_slots,  # [B] slots in use after the SPLITS of the tail
    out,
    sinks,  # [H] or None
    HEADS: tl.constexpr,  # H
    SIZE: tl.constexpr,
    SIZE_2: tl.constexpr,
    SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
    MERGED_HEADS: tl.constexpr,  # query heads per program
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * MERGED_HEADS + tl.arange(0, MERGED_HEADS)
    column = tl.arange(0, SIZE_2)
    is_head = head < HEADS
    inside = is_head[:, None] & (column < SIZE)[None, :]
    top = tl.full([MERGED_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([MERGED_HEADS], tl.float32)
    acc = tl.zeros([MERGED_HEADS, SIZE_2], tl.float32)
    used = SPLITS + tl.load(shared_slots + row).to(tl.int32)
    for slot in tl.range(0, used, num_stages=3):
        at_slot = (row * SLOTS + slot) * HEADS + head
        its_top = tl.load(stats + at_slot * 2, mask=is_head, other=float("-inf"))
        its_total = tl.load(stats + at_slot * 2 + 1, mask=is_head, other=0.0)
        its_acc = tl.load(
            partial + at_slot[:, None] * SIZE + column[None, :], mask=inside, other=0.0
        )
        new_top = tl.maximum(top, its_top)
        # an empty slot has top -inf, and -inf - -inf would be NaN
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade = tl.exp2(top - base)
        weight = tl.exp2(its_top - base)
        total = total * fade + its_total * weight
        acc = acc * fade[:, None] + its_acc * weight[:, None]
        top = new_top
    if sinks is not None:
        total += sink_weight(top, tl.load(sinks + head, mask=is_head, other=0.0))
    result = acc / tl.where(total == 0, 1.0, total)[:, None]
    at = (row * HEADS + head)[:, None] * SIZE + column[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


def stages(q: Tensor) -> int:
    """Turns whose pages are on their way at a time; two turns of float32, or of heads of more than 256 bytes,
    need more than 99 KB of memory, and two of more than 512 bytes more than 227."""
    width = q.shape[-1] * q.itemsize
    if has_large_shared_memory(q.device):
        return 2 if width <= 512 else 1
    return 2 if width <= 256 and q.dtype != torch.float32 else 1


def scratch(
    batch: int, slots: int, heads: int, size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Buffers for the partial results of `slots` items per row."""
    shape = (batch, slots, heads)
    return (
        torch.empty((*shape, size), dtype=torch.float32, device=device),
        torch.empty((*shape, 2), dtype=torch.float32, device=device),
    )


def decode(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    lengths: Tensor,
    tails: Tensor,
    items: Tensor,
    shared_slots: Tensor,
    *,
    splits: int,
    slots: int,
    tile_rows: int,
    space: tuple[Tensor, Tensor],
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [B,H,d], see the module; `slots` >= splits + the largest of `shared_slots`.

    window   how many positions a row sees, its own included; 0: all
    sinks    [H], a score of each head without a value
    """
    batch, heads, size = q.shape
    kv_heads, page = k_pool.shape[1:3]
    partial, stats = space
    q = q.contiguous()
    out = torch.empty_like(q)
    size_2 = max(triton.next_power_of_2(size), 16)
    _attend[(kv_heads, batch * splits + len(items))](
        q,
        k_pool,
        v_pool,
        table,
        table.stride(0),
        lengths,
        tails,
        items,
        batch * splits,
        size**-0.5 * LOG2_E,
        partial,
        stats,
        out,
        sinks,
        HEADS=kv_heads,
        GROUP=heads // kv_heads,
        SIZE=size,
        SIZE_2=size_2,
        PAGE=page,
        ROWS=tile_rows,
        SPLITS=splits,
        SLOTS=slots,
        STAGES=stages(q),
        WINDOW=window,
        num_warps=4,
    )
    if slots > 1:
        merged_heads = min(triton.next_power_of_2(heads), 4)
        _merge[(batch, triton.cdiv(heads, merged_heads))](
            partial,
            stats,
            shared_slots,
            out,
            sinks,
            HEADS=heads,
            SIZE=size,
            SIZE_2=size_2,
            SPLITS=splits,
            SLOTS=slots,
            MERGED_HEADS=merged_heads,
            num_warps=4,
        )
    return out
