"""Attention that adds in an order that depends on positions only: the same bits in engine and learner.

    T queries in one list, H query heads in K groups of G, d head size

Keys come in blocks of 64 positions, counted from the beginning of the query's own path. One running softmax
goes over the blocks of a segment (`fold_block`), and segments are merged from first to last
(`merge_segment`). A block in which a query sees nothing changes no bit of its result, so blocks before all
windows of a tile are skipped. And neither what else is in the tile nor how work is spread over programs
matters, as long as a segment is not divided:

    learner   `path_attention`: tiles of a packed forest, its keys copied into blocks by `PathBlocks`
    prompts   `attend_pages`: tiles of new tokens, keys in the engine's pages
    decoding  `engine.native.cuda.kernels.segments`: one query, segments in different programs

Tiles have different numbers of rows. No sum may depend on them, so every sum over keys is a matrix product,
whose instructions add along K in one order (`product_probe` checks that on the GPU at hand): the weights of
a row are added up by multiplying them by ones. Keys that a query does not see have weight 0; what is stored
in their place must be finite, which pages always are (`kv.pages`). The gradients are those of `interval`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from graft.models.kernels import interval
from graft.models.kernels.interval_kernels import sink_weight
from graft.models.kernels.kv_rounding import widen
from graft.models.tree.block_lists import QUERIES, BlockLists
from graft.models.tree.path_blocks import BLOCK, SEGMENT, PathBlocks

ONES = 16
"""Columns of the ones that weights are multiplied by: the fewest that a product takes."""


@triton.jit
def fold_block(
    top, sums, acc, query, keys, values, is_seen, SCALE: tl.constexpr, k_scale=None, v_scale=None
):
    """Add a block of keys to the running maximum, sum and output of its segment.

    query [rows, W], keys and values [BLOCK, W], is_seen [rows, BLOCK] or None: all of them; the maximum
    is -inf before the first key that a row sees; the columns of `sums` are equal.

    k_scale, v_scale   [BLOCK] of keys and values that are codes (`models.kv_slots`): powers of two, so
                       that scores and weights can be multiplied by them instead
    """
    if k_scale is not None:
        keys, values = widen(keys, query.dtype), widen(values, query.dtype)
    score = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if k_scale is not None:
        score *= k_scale.to(tl.float32)[None, :]
    new_top, weight, fade = weigh_block(top, score, is_seen, SCALE, values.dtype)
    sums = add_weights(sums, weight, fade)
    if v_scale is not None:
        weight = (weight.to(tl.float32) * v_scale.to(tl.float32)[None, :]).to(values.dtype)
    acc = tl.dot(weight, values, acc * fade, input_precision="ieee")
    return new_top, sums, acc


@triton.jit
def add_weights(sums, weight, fade):
    ones = tl.full([weight.shape[1], sums.shape[1]], 1.0, weight.dtype)
    return tl.dot(weight, ones, sums * fade, input_precision="ieee")


@triton.jit
def weigh_block(top, score, is_seen, SCALE: tl.constexpr, dtype: tl.constexpr):
    """The new maximum, the keys' weights [rows, BLOCK], and the factor on what was added before."""
    if is_seen is not None:
        score = tl.where(is_seen, score, float("-inf"))
    # an integer: changing it multiplies by a power of two, which rounds nothing
    new_top = tl.maximum(top, tl.ceil(tl.max(score, 1) * SCALE))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    # one rounding, whatever else a compiler would make of it; then rounded again before they are summed,
    # so that the result is an exact weighted average
    weight = tl.exp2(
        tl.fma(score, SCALE + tl.zeros_like(score), -base[:, None] + tl.zeros_like(score))
    )
    return new_top, weight.to(dtype), tl.exp2(top - base)[:, None]


@triton.jit
def merge_segment(top, sums, acc, its_top, its_sums, its_acc):
    """The segments so far and the next one; an empty segment (maximum -inf) changes nothing.

    Factors are powers of two, so it does not matter whether a product and an addition are fused.
    """
    new_top = tl.maximum(top, its_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    fade, weight = tl.exp2(top - base)[:, None], tl.exp2(its_top - base)[:, None]
    return new_top, sums * fade + its_sums * weight, acc * fade + its_acc * weight


@triton.jit
def empty_segment(ROWS: tl.constexpr, ONES: tl.constexpr, W: tl.constexpr):
    """Maximum, sums and output before the first key."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    return top, tl.zeros([ROWS, ONES], tl.float32), tl.zeros([ROWS, W], tl.float32)


@triton.jit
def _fold_at(
    top, sums, acc, query, k, v, k_scales, v_scales, block, column, is_seen,
    SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`fold_block` of the rows from `block` on."""
    keys, values = k.load([block, column]), v.load([block, column])
    k_scale = None
    v_scale = None
    if k_scales is not None:
        k_scale = tl.load(k_scales + block + tl.arange(0, BLOCK))
        v_scale = tl.load(v_scales + block + tl.arange(0, BLOCK))
    return fold_block(top, sums, acc, query, keys, values, is_seen, SCALE, k_scale, v_scale)


@triton.jit
def _fold_some(
    top, sums, acc, query, query_position, k, v, k_scales, v_scales,
    row_of_head, column_of_head, blocks, begin, stop,
    SCALE: tl.constexpr, BLOCK_ROWS: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, SEGMENT: tl.constexpr, ONES: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Add blocks begin to stop of a path, of which queries may see a part; a segment ends with the last."""
    its_top, its_sums, its_acc = empty_segment(query.shape[0], ONES, W)
    for number in tl.range(begin, stop):
        if number % SEGMENT == 0:
            top, sums, acc = merge_segment(top, sums, acc, its_top, its_sums, its_acc)
            its_top, its_sums, its_acc = empty_segment(query.shape[0], ONES, W)
        block = tl.load(blocks + number) * BLOCK_ROWS + row_of_head
        seen = number * BLOCK + tl.arange(0, BLOCK)
        is_seen = seen[None, :] <= query_position[:, None]
        if WINDOW:
            is_seen &= seen[None, :] > query_position[:, None] - WINDOW
        its_top, its_sums, its_acc = _fold_at(
            its_top, its_sums, its_acc, query, k, v, k_scales, v_scales, block, column_of_head, is_seen,
            SCALE, BLOCK,
        )  # fmt: skip
    return merge_segment(top, sums, acc, its_top, its_sums, its_acc)


@triton.jit(do_not_specialize=["table_stride", "lse_stride"])
def _walk(
    q,  # [T, H, d]
    k,  # descriptor of rows that are fetched BLOCK at a time
    v,
    k_scales,  # of these rows, or None
    v_scales,
    tiles,  # [n, 4] first query, queries, position of the first, row of the table
    table,  # numbers of blocks, rows `table_stride` apart
    table_stride,
    out,  # [T, H, d]
    lse,  # [H, lse_stride] or None
    lse_stride,
    sinks,  # [H] or None
    q_stride, q_head,
    SCALE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, HEAD_ROWS: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, SEGMENT: tl.constexpr, ONES: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(1) * 4
    first, count = tl.load(tile), tl.load(tile + 1)
    position, path = tl.load(tile + 2), tl.load(tile + 3)
    head = tl.program_id(0)
    here = tl.arange(0, QUERIES)
    column = tl.arange(0, W)
    inside = (here < count)[:, None] & (column < D)[None, :]
    token = (first + here).to(tl.int64)
    query = tl.load(
        q + (token * q_stride + head * q_head)[:, None] + column[None, :], mask=inside, other=0.0
    )
    kv_head = head // GROUP
    row_of_head, column_of_head = kv_head * HEAD_ROWS, kv_head * HEAD_COLUMNS
    blocks = table + path.to(tl.int64) * table_stride
    num_blocks = tl.cdiv(position + count, BLOCK)
    num_full = (position + 1) // BLOCK  # blocks that every query sees
    top, sums, acc = empty_segment(QUERIES, ONES, W)
    first_segment, last_segment = 0, num_full // SEGMENT  # that every query sees whole
    if WINDOW:
        oldest = tl.maximum(position + 1 - WINDOW, 0)  # that any query sees
        first_segment = tl.cdiv(tl.maximum(position + count - WINDOW, 0), BLOCK * SEGMENT)
        last_segment = tl.maximum(last_segment, first_segment)
        top, sums, acc = _fold_some(
            top, sums, acc, query, position + here, k, v, k_scales, v_scales,
            row_of_head, column_of_head, blocks,
            oldest // BLOCK, tl.minimum(first_segment * SEGMENT, num_blocks),
            SCALE, BLOCK_ROWS, WINDOW, BLOCK, SEGMENT, ONES, W,
        )  # fmt: skip
    for segment in tl.range(first_segment, last_segment):
        its_top, its_sums, its_acc = empty_segment(QUERIES, ONES, W)
        for part in tl.range(0, SEGMENT):
            block = tl.load(blocks + segment * SEGMENT + part) * BLOCK_ROWS + row_of_head
            its_top, its_sums, its_acc = _fold_at(
                its_top, its_sums, its_acc, query, k, v, k_scales, v_scales, block, column_of_head, None,
                SCALE, BLOCK,
            )  # fmt: skip
        top, sums, acc = merge_segment(top, sums, acc, its_top, its_sums, its_acc)
    top, sums, acc = _fold_some(
        top, sums, acc, query, position + here, k, v, k_scales, v_scales,
        row_of_head, column_of_head, blocks,
        last_segment * SEGMENT, num_blocks,
        SCALE, BLOCK_ROWS, WINDOW, BLOCK, SEGMENT, ONES, W,
    )  # fmt: skip
    total = tl.max(sums, 1)  # of equal columns
    if sinks is not None:
        total += sink_weight(top, tl.load(sinks + head))
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (token * HEADS + head)[:, None] * D + column[None, :], result, mask=inside)
    if lse is not None:
        number = head.to(tl.int64) * lse_stride + first + here
        tl.store(lse + number, top + tl.log2(total), mask=here < count)


def sizes(q: Tensor, kv_heads: int) -> dict[str, Any]:
    """The constants that all kernels of this order share."""
    size = q.shape[-1]
    return {
        "SCALE": size**-0.5 * interval.LOG2_E,
        "GROUP": q.shape[1] // kv_heads,
        "D": size,
        "W": max(16, triton.next_power_of_2(size)),
        "BLOCK": BLOCK,
        "SEGMENT": SEGMENT,
        "ONES": ONES,
    }


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tensor,
    table: Tensor,
    table_stride: int,
    *,
    kv_heads: int,
    window: int,
    sinks: Tensor | None,
    lse: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
    **layout: Any,
) -> Tensor:
    """k and v [rows, columns]: the rows that a block has of a head are at `layout`."""
    heads = q.shape[1]
    shared = sizes(q, kv_heads)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    is_wide = q.dtype == torch.float32
    fetched = [TensorDescriptor(x, [*x.shape], [*x.stride()], [BLOCK, shared["W"]]) for x in (k, v)]
    _walk[(heads, len(tiles))](
        q, *fetched, *scales, tiles, table, table_stride, out, lse, 0 if lse is None else lse.stride(0),
        sinks,
        *q.stride()[:2], HEADS=heads, QUERIES=BLOCK, WINDOW=window, **shared, **layout,
        num_warps=4 if shared["W"] <= 128 else 8, num_stages=1 if is_wide else 3,
    )  # fmt: skip
    return out


def attend_pages(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    tiles: Tensor,
    window: int = 0,
    sinks: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
) -> Tensor:
    """Attention of new tokens q [T,H,d] over pages [pages, K, BLOCK, d], which have theirs already;
    tiles [n, 4] cover every token once: see `_walk`. Pages of codes have `scales` [pages, K, BLOCK]."""
    kv_heads = k_pool.shape[1]
    rows = [pool.view(-1, pool.shape[-1]) for pool in (k_pool, v_pool)]
    return _launch(
        q, *rows, tiles, table, table.stride(0), kv_heads=kv_heads, window=window,
        sinks=sinks, scales=scales, BLOCK_ROWS=kv_heads * BLOCK, HEAD_ROWS=BLOCK, HEAD_COLUMNS=0,
    )  # fmt: skip


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    path: PathBlocks,
    window: int = 0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`interval.attend` in this order."""
    length, heads, size = q.shape
    # zeros: the gradient kernels read whole blocks
    lse = torch.zeros(
        heads, triton.cdiv(length, QUERIES) * QUERIES, dtype=torch.float32, device=q.device
    )
    # copied: a block is then fetched at once, and a copy takes a tenth of the attention's time
    blocks = [x.index_select(0, path.index).flatten(1) for x in (k, v)]
    out = _launch(
        q, *blocks, path.tiles, path.table, 1, kv_heads=k.shape[1], window=window, sinks=sinks, lse=lse,
        BLOCK_ROWS=BLOCK, HEAD_ROWS=0, HEAD_COLUMNS=size,
    )  # fmt: skip
    return out, lse


class _PathAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        path: PathBlocks,
        blocks: BlockLists,
    ) -> Tensor:  # type: ignore[override]
        out, lse = attend(q, k, v, path, blocks.window, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *saved, sinks = ctx.saved_tensors
        return *interval.differentiate(*saved, grads[0], ctx.blocks, sinks), None, None


def path_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    path: PathBlocks,
    blocks: BlockLists,
    sinks: Tensor | None = None,
) -> Tensor:
    """`interval.interval_attention` in this order: q [L, H, d], k and v [L, K, d] -> [L, H, d]."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    return _PathAttention.apply(q, k, v, sinks, path, blocks)
