"""Store the keys and values of a step in their pages.

T tokens, K key/value heads of size d; a pool of one layer is [pages, K, page, d]
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["table_stride"])
def _write(
    k,  # [T, K, d]
    v,
    k_pool,  # [pages, K, page, d]
    v_pool,
    table,  # [rows, P] page numbers
    table_stride,
    rows,  # [T] line of the table
    positions,  # [T]
    lengths,  # [rows] tokens a row may look at; 0: nobody is there, write nothing
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS_2: tl.constexpr,  # the next powers of two
    SIZE_2: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + token)
    if tl.load(lengths + row) == 0:
        return
    position = tl.load(positions + token)
    page = tl.load(table + row * table_stride + position // PAGE).to(tl.int64)
    head = tl.arange(0, HEADS_2)[:, None]
    column = tl.arange(0, SIZE_2)[None, :]
    inside = (head < HEADS) & (column < SIZE)
    source = (token * HEADS + head) * SIZE + column
    target = ((page * HEADS + head) * PAGE + position % PAGE) * SIZE + column
    tl.store(k_pool + target, tl.load(k + source, mask=inside), mask=inside)
    tl.store(v_pool + target, tl.load(v + source, mask=inside), mask=inside)


def write(
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    rows: Tensor,
    positions: Tensor,
    lengths: Tensor,
) -> None:
    """Put k, v [T,K,d] of token t at `positions[t]` of the sequence in line `rows[t]`."""
    tokens, heads, size = k.shape
    _write[(tokens,)](
        k.contiguous(),
        v.contiguous(),
        k_pool,
        v_pool,
        table,
        table.stride(0),
        rows,
        positions,
        lengths,
        HEADS=heads,
        SIZE=size,
        PAGE=k_pool.shape[2],
        HEADS_2=triton.next_power_of_2(heads),
        SIZE_2=triton.next_power_of_2(size),
        num_warps=4,
    )
