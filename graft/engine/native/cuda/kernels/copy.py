"""Copy pages: all forks of a step in one launch.

pool [layers, 2, pages, K, page, d]
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192


@triton.jit
def _copy(pool, pairs, plane, page_size, BLOCK: tl.constexpr):
    pair = pairs + tl.program_id(2) * 2
    start = tl.program_id(1).to(tl.int64) * plane
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < page_size
    values = tl.load(pool + start + tl.load(pair) * page_size + column, mask=inside)
    tl.store(pool + start + tl.load(pair + 1) * page_size + column, values, mask=inside)


def copy(pool: Tensor, pairs: Tensor) -> None:
    """pairs [n, 2] int64: source and target pages, in every layer; targets differ."""
    page_size = pool[0, 0, 0].numel()
    planes = pool.shape[0] * pool.shape[1]
    grid = (triton.cdiv(page_size, BLOCK), planes, len(pairs))
    _copy[grid](pool, pairs, pool.stride(1), page_size, BLOCK=BLOCK, num_warps=8)
