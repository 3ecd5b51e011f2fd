"""Attention that adds in an order that depends on positions only: the same bits in engine and learner.

    T queries in one list, H query heads in K groups of G, d head size

Keys come in blocks of 64 positions, counted from the beginning of the query's own path. One running softmax
goes over the blocks of a segment (`fold_block`), and segments are merged from first to last
(`merge_segment`). A block in which a query sees nothing changes no bit of its result. So neither what else
is in the tile nor how work is spread over programs matters, as long as a segment is not divided:

    learner   `path_attention`: tiles of a packed forest, keys through `PathBlocks`
    prompts   `attend_pages`: tiles of new tokens, keys in the engine's pages
    decoding  `engine.native.cuda.kernels.segments`: one query, segments in different programs

All three call these functions with tiles of one shape: a compiler may add the numbers of a tile in an order
that depends on its shape. The gradients are those of `interval`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.models.kernels.interval import LOG2_E, _IntervalAttention
from graft.models.tree.block_lists import QUERIES, BlockLists
from graft.models.tree.path_blocks import BLOCK, SEGMENT, PathBlocks

ROWS = 64
"""Query rows of a tile. Smaller ones are another instruction on a Hopper GPU."""

NUM_WARPS, NUM_STAGES = 4, 2


@triton.jit
def fold_block(top, total, acc, query, keys, values, is_seen, SCALE: tl.constexpr):
    """Add a block of keys to the running maximum, sum and output of its segment.

    query [ROWS, W], keys and values [BLOCK, W], is_seen [ROWS, BLOCK]; the maximum is -inf before the
    first key that a row sees.
    """
    score = tl.dot(query, tl.trans(keys), input_precision="ieee") * SCALE
    score = tl.where(is_seen, score, float("-inf"))
    # an integer: changing it multiplies by a power of two, which rounds nothing
    new_top = tl.maximum(top, tl.ceil(tl.max(score, 1)))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    # rounded before they are summed, so that the result is an exact weighted average
    weight = tl.exp2(score - base[:, None]).to(values.dtype)
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weight.to(tl.float32), 1)
    acc = tl.dot(weight, values, acc * fade[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def merge_segment(top, total, acc, its_top, its_total, its_acc):
    """The segments so far and the next one; an empty segment (maximum -inf) changes nothing."""
    new_top = tl.maximum(top, its_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    fade, weight = tl.exp2(top - base), tl.exp2(its_top - base)
    total = total * fade + its_total * weight
    acc = acc * fade[:, None] + its_acc * weight[:, None]
    return new_top, total, acc


@triton.jit
def empty_segment(ROWS: tl.constexpr, W: tl.constexpr):
    """Maximum, sum and output before the first key."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    return top, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, W], tl.float32)


@triton.jit(do_not_specialize=["table_stride", "lse_stride"])
def _walk(
    q,  # [T, H, d]
    k,  # [T, K, d], or pages [pages, K, BLOCK, d] without an index
    v,
    tiles,  # [n, 4] first query, queries, position of the first, row of the table
    table,  # numbers of blocks or pages, rows `table_stride` apart
    table_stride,
    index,  # [blocks * BLOCK] the rows of k and v in a block, or None: they are pages
    out,  # [T, H, d]
    lse,  # [H, lse_stride] or None
    lse_stride,
    q_stride, q_head, k_stride, k_head, v_stride, v_head,
    SCALE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    BLOCK: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 4
    first, count = tl.load(tile), tl.load(tile + 1)
    position, path = tl.load(tile + 2), tl.load(tile + 3)
    row = tl.arange(0, ROWS)
    is_used = row < count
    column = tl.arange(0, W)
    in_size = (column < D)[None, :]
    inside = is_used[:, None] & in_size
    token = (first + row).to(tl.int64)
    query = tl.load(
        q + (token * q_stride + head * q_head)[:, None] + column[None, :], mask=inside, other=0.0
    )
    key = tl.arange(0, BLOCK)
    keys_of = k + head // GROUP * k_head
    values_of = v + head // GROUP * v_head
    blocks = table + path.to(tl.int64) * table_stride
    end = position + count
    num_blocks = tl.cdiv(end, BLOCK)
    top, total, acc = empty_segment(ROWS, W)
    its_top, its_total, its_acc = empty_segment(ROWS, W)
    for number in tl.range(0, num_blocks):
        block = tl.load(blocks + number).to(tl.int64)
        seen = number * BLOCK + key
        is_written = seen < end
        if index is None:
            k_row, v_row = block * k_stride + key * D, block * v_stride + key * D
        else:
            packed = tl.load(index + block * BLOCK + key).to(tl.int64)
            k_row, v_row = packed * k_stride, packed * v_stride
        present = is_written[:, None] & in_size
        keys = tl.load(keys_of + k_row[:, None] + column[None, :], mask=present, other=0.0)
        values = tl.load(values_of + v_row[:, None] + column[None, :], mask=present, other=0.0)
        is_seen = (seen[None, :] <= (position + row)[:, None]) & is_written[None, :]
        its_top, its_total, its_acc = fold_block(
            its_top, its_total, its_acc, query, keys, values, is_seen, SCALE
        )
        if ((number + 1) % SEGMENT == 0) | (number + 1 == num_blocks):
            top, total, acc = merge_segment(top, total, acc, its_top, its_total, its_acc)
            its_top, its_total, its_acc = empty_segment(ROWS, W)
    total = tl.where(is_used, total, 1.0)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (token * HEADS + head)[:, None] * D + column[None, :], result, mask=inside)
    if lse is not None:
        number = head.to(tl.int64) * lse_stride + first + row
        tl.store(lse + number, top + tl.log2(total), mask=is_used)


def sizes(q: Tensor, kv_heads: int) -> dict[str, Any]:
    """The constants that all kernels of this order share."""
    size = q.shape[-1]
    return {
        "SCALE": size**-0.5 * LOG2_E,
        "GROUP": q.shape[1] // kv_heads,
        "D": size,
        "W": max(16, triton.next_power_of_2(size)),
        "BLOCK": BLOCK,
        "SEGMENT": SEGMENT,
        "ROWS": ROWS,
        "num_warps": NUM_WARPS,
        "num_stages": NUM_STAGES,
    }


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tensor,
    table: Tensor,
    table_stride: int,
    index: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    heads = q.shape[1]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _walk[(heads, len(tiles))](
        q, k, v, tiles, table, table_stride, index, out, lse,
        0 if lse is None else lse.stride(0),
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], HEADS=heads, **sizes(q, k.shape[1]),
    )  # fmt: skip
    return out


def attend_pages(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, tiles: Tensor) -> Tensor:
    """`engine.native.cuda.kernels.extend.extend` in this order: q [T,H,d], pages of BLOCK positions."""
    return _launch(q, k_pool, v_pool, tiles, table, table.stride(0))


class _PathAttention(_IntervalAttention):
    """This order forward; backward as in any other order."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, forest: tuple[PathBlocks, BlockLists]
    ) -> Tensor:
        path, ctx.blocks = forest
        length, heads, _ = q.shape
        # zeros: the gradient kernels read whole blocks
        lse = torch.zeros(
            heads, triton.cdiv(length, QUERIES) * QUERIES, dtype=torch.float32, device=q.device
        )
        out = _launch(q, k, v, path.tiles, path.table, 1, path.index, lse)
        ctx.save_for_backward(q, k, v, out, lse)
        return out


def path_attention(q: Tensor, k: Tensor, v: Tensor, path: PathBlocks, blocks: BlockLists) -> Tensor:
    """`interval.interval_attention` in this order: q [L, H, d], k and v [L, K, d] -> [L, H, d]."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    return _PathAttention.apply(q, k, v, (path, blocks))
