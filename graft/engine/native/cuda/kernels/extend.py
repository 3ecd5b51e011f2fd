"""Attention of several new tokens per sequence over its pages: prompts and tool results.

    T tokens of all sequences in one list, H query heads in K groups of G, d head size

The new keys and values are in the pages already. A block is up to BLOCK queries of one sequence:
(first token in the list, queries, position of the first, row of the table).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.engine.native.cuda.kernels.decode import LOG2_E, fold, stages
from graft.models.kernels.interval_kernels import sink_weight

BLOCK = 64
BLOCK_FIELDS = 4


@triton.jit(do_not_specialize=["table_stride", "scale"])
def _extend(
    q,  # [T, H, d]
    k_pool,  # [pages, K, page, d]
    v_pool,
    table,
    table_stride,
    blocks,  # [n, 4]
    scale,
    out,
    sinks,  # [H] or None
    HEADS: tl.constexpr,  # K
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_2: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    query_head = tl.program_id(0)
    block = blocks + tl.program_id(1) * 4
    token = tl.load(block)
    count = tl.load(block + 1)
    position = tl.load(block + 2)
    row = tl.load(block + 3)
    head = query_head // GROUP
    query_row = tl.arange(0, BLOCK)
    is_used = query_row < count
    column = tl.arange(0, SIZE_2)
    in_size = column < SIZE
    at = ((token + query_row).to(tl.int64) * (HEADS * GROUP) + query_head)[:, None] * SIZE + column
    inside = is_used[:, None] & in_size[None, :]
    query = tl.load(q + at, mask=inside, other=0.0)
    key = tl.arange(0, PAGE)
    tile = key[:, None] * SIZE + column[None, :]
    pages = table + row.to(tl.int64) * table_stride
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, SIZE_2], tl.float32)
    end = position + count
    first = 0
    if WINDOW:
        first = tl.maximum(position + 1 - WINDOW, 0) // PAGE
    for index in tl.range(first, tl.cdiv(end, PAGE), num_stages=STAGES):
        page = tl.load(pages + index).to(tl.int64)
        base = (page * HEADS + head) * (PAGE * SIZE)
        seen = index * PAGE + key
        is_written = seen < end
        keys = tl.load(k_pool + base + tile, mask=in_size[None, :], other=0.0)
        score = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        is_past = seen[None, :] <= (position + query_row)[:, None]
        if WINDOW:
            is_past &= seen[None, :] > (position + query_row)[:, None] - WINDOW
        score = tl.where(is_past & is_written[None, :], score, float("-inf"))
        values = tl.load(
            v_pool + base + tile, mask=is_written[:, None] & in_size[None, :], other=0.0
        )
        top, total, acc = fold(top, total, acc, score, values, WINDOW)
    if sinks is not None:
        total += sink_weight(top, tl.load(sinks + query_head))
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


def extend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    blocks: Tensor,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [T,H,d]; `blocks` [n,4] cover every token once. With a `window` a token sees so many
    positions, its own included."""
    _, heads, size = q.shape
    kv_heads, page = k_pool.shape[1:3]
    q = q.contiguous()
    out = torch.empty_like(q)
    _extend[(heads, len(blocks))](
        q,
        k_pool,
        v_pool,
        table,
        table.stride(0),
        blocks,
        size**-0.5 * LOG2_E,
        out,
        sinks,
        HEADS=kv_heads,
        GROUP=heads // kv_heads,
        SIZE=size,
        SIZE_2=max(triton.next_power_of_2(size), 16),
        PAGE=page,
        BLOCK=BLOCK,
        STAGES=stages(q),
        WINDOW=window,
        num_warps=4,
    )
    return out
