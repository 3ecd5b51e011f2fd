"""Which experts a token goes to, and which tokens an expert gets.

    T tokens, E experts, k chosen for each token, R = T k rows: row t k + s is slot s of token t

    chosen of three tokens, k = 2                 0 3 | 3 1 | 0 3
    rows by expert                                0 4 | 3 | . | 1 2 5
    tiles of at most two rows of one expert       0 4 | 3 | 1 2 | 5

How many tiles there are depends on the tokens. As many are launched as there can be, and those beyond the
last end at once: nothing is read back by the host, and a CUDA graph can record it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.models.kernels.launch import after_previous, chained

ROUTE_ROWS = 4
GROUP_ROWS = 4096
"""Rows of a step, of one program."""


class Groups(NamedTuple):
    """The rows of each expert, as tiles, on the device."""

    order: Tensor | None
    """[R] rows by expert; those of one expert ascend. None: each row is a tile, in the order of rows."""
    starts: Tensor | None
    """[E + 1] where each expert's begin in `order`, and R."""
    experts: Tensor
    """[tiles] the expert of each tile; E where there is none."""
    first: Tensor | None
    """[tiles] where its rows begin in `order`."""
    height: int
    """Most rows of a tile."""
    chosen: Tensor
    """[T, k] the experts of each token."""
    count: int
    """Number of experts."""

    @property
    def top_k(self) -> int:
        return self.chosen.shape[1]


@triton.jit
def _route(
    logits,  # [T, E]
    correction,  # [E] or None
    weights, chosen,  # [T, k]
    rows, scaling,
    E: tl.constexpr, TOP_K: tl.constexpr, IS_SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        after_previous()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert, slot = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    is_row, is_expert = (row < rows)[:, None], (expert < E)[None, :]
    at = logits + row[:, None] * E + expert[None, :]
    logit = tl.load(at, mask=is_row & is_expert, other=0.0)
    if IS_SIGMOID:
        score = tl.sigmoid(logit)
    else:
        logit = tl.where(is_expert, logit, -float("inf"))
        score = tl.exp(logit - tl.max(logit, 1)[:, None])
        score = score / tl.sum(score, 1)[:, None]
    rated = score
    if correction is not None:
        rated += tl.load(correction + expert, mask=expert < E, other=0.0)[None, :]
    rated = tl.where(is_expert, rated, -float("inf"))
    best = tl.zeros([ROWS, BLOCK_K], tl.int32)
    scores = tl.zeros([ROWS, BLOCK_K], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for s in tl.static_range(TOP_K):
        top = tl.argmax(rated, 1, tie_break_left=True)
        is_top = expert[None, :] == top[:, None]
        value = tl.sum(tl.where(is_top, score, 0.0), 1)
        rated = tl.where(is_top, -float("inf"), rated)
        best = tl.where(slot[None, :] == s, top[:, None], best)
        scores = tl.where(slot[None, :] == s, value[:, None], scores)
        total += value
    if RENORMALISE:
        scores = scores / (total + 1e-20)[:, None]
    at = row[:, None] * TOP_K + slot[None, :]
    mask = is_row & (slot < TOP_K)[None, :]
    tl.store(weights + at, scores * scaling, mask=mask)
    tl.store(chosen + at, best, mask=mask)


def choose_and_weigh(
    logits: Tensor, correction: Tensor | None, top_k: int, renormalise: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """Weights [T, k] and numbers [T, k] of each token's experts by logits [T, E] in fp32, the best first, of
    equals the lower number; with a correction [E] scores are sigmoids. No gradient."""
    rows, count = logits.shape
    weights = logits.new_empty(rows, top_k)
    chosen = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    _route[(triton.cdiv(rows, ROUTE_ROWS),)](
        logits.contiguous(), correction, weights, chosen, rows, scaling,
        E=count, TOP_K=top_k, IS_SIGMOID=correction is not None, RENORMALISE=renormalise,
        ROWS=ROUTE_ROWS, BLOCK_E=triton.next_power_of_2(count),
        BLOCK_K=triton.next_power_of_2(top_k), num_warps=4, **chained(logits.device),
    )  # fmt: skip
    return weights, chosen


@triton.jit(do_not_specialize=["rows", "tiles"])
def _group(
    chosen,  # [R]
    order, starts, experts, first,
    rows, tiles,
    E: tl.constexpr, HEIGHT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        after_previous()
    mine = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    # every program counts all experts: cheaper than one more launch
    counts = tl.zeros([BLOCK_E], tl.int32)
    for begin in tl.range(0, rows, ROWS):
        row = begin + tl.arange(0, ROWS)
        of_row = tl.load(chosen + row, mask=row < rows, other=0)
        counts += tl.histogram(of_row, BLOCK_E, mask=row < rows)
    tiles_of = tl.cdiv(counts, HEIGHT)
    start = tl.sum(tl.where(expert < mine, counts, 0))
    first_tile = tl.sum(tl.where(expert < mine, tiles_of, 0))
    own_tiles = tl.sum(tl.where(expert == mine, tiles_of, 0))
    tl.store(starts + mine, start)
    place = start
    for begin in tl.range(0, rows, ROWS):
        row = begin + tl.arange(0, ROWS)
        of_row = tl.load(chosen + row, mask=row < rows, other=E)
        is_mine = (of_row == mine).to(tl.int32)
        tl.store(order + place + tl.cumsum(is_mine, 0) - 1, row, mask=is_mine > 0)
        place += tl.sum(is_mine)
    for number in tl.range(0, own_tiles):
        tl.store(experts + first_tile + number, mine)
        tl.store(first + first_tile + number, start + number * HEIGHT)
    if mine == E - 1:
        tl.store(starts + E, rows)
    for number in tl.range(tl.sum(tiles_of) + mine, tiles, E):
        tl.store(experts + number, E)


def height_of(rows: int, count: int) -> int:
    """Rows of a tile: few where an expert has few, and then weights are what takes time."""
    for height, most in ((16, 8), (32, 24), (64, 48)):
        if rows <= most * count:
            return height
    return 128


def group_rows(chosen: Tensor, count: int) -> Groups:
    """The groups of rows whose tokens chose experts [T, k]."""
    chosen = chosen.int()  # Triton 3.6 cannot count longer numbers
    rows = chosen.numel()
    height = height_of(rows, count)
    tiles = min(rows, triton.cdiv(rows, height) + count)
    numbers: dict[str, Any] = {"dtype": torch.int32, "device": chosen.device}
    order, starts = torch.empty(rows, **numbers), torch.empty(count + 1, **numbers)
    experts, first = torch.empty(tiles, **numbers), torch.empty(tiles, **numbers)
    _group[(count,)](
        chosen, order, starts, experts, first, rows, tiles, E=count, HEIGHT=height,
        ROWS=min(GROUP_ROWS, triton.next_power_of_2(rows)),
        BLOCK_E=triton.next_power_of_2(count), num_warps=4 if rows <= 1024 else 8,
        **chained(chosen.device),
    )  # fmt: skip
    return Groups(order, starts, experts, first, height, chosen, count)


def rows_apart(chosen: Tensor, count: int) -> Groups:
    """Each row as a tile of its own, for few rows: two of one expert are rare, and nothing is launched."""
    return Groups(None, None, chosen.flatten(), None, 1, chosen, count)
