"""The lowest score that top-k, top-p and min-p keep, per row, without sorting.

B rows, V vocabulary

The scores that survive top-k are those of at least the k-th largest one; the k-th largest is found
by bisection on the bits of a float: bit by bit from the top, "are there k scores at or above this
candidate?". Top-p does the same with the mass instead of the count. 32 passes over a row that the
second-level cache holds; equal scores are kept or removed together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.engine.native.cuda.kernels.draw import _scores

CHUNK = 8192


@triton.jit
def _rank(score):
    """An int32 with the order of the float."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _score_of(rank):
    bits = tl.where(rank >= 0, rank, rank ^ 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["logits_stride", "state_stride"])
def _floors(
    logits,
    logits_stride,
    state,
    state_stride,
    inv_temperature,
    allowed,
    stops,
    top_k,  # [B] float32, as the others: exact up to 2**24
    top_p,
    min_p,
    floors,  # [B] float32
    vocabulary: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_MASK: tl.constexpr,
    STOPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, CHUNK)
    top = tl.full([], float("-inf"), tl.float32)
    for start in range(0, vocabulary, CHUNK):
        score = _scores(
            logits, row, start + offset, vocabulary, logits_stride, state, state_stride, inv_temperature,
            inv_temperature, allowed, stops, HAS_MASK, False, STOPS,
        )  # fmt: skip
        top = tl.maximum(top, tl.max(score, 0))
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    floor = tl.where(tl.load(min_p + row) > 0, top + tl.log(tl.load(min_p + row)), float("-inf"))
    # the largest rank that k scores reach, then the largest that a share p of their mass reaches
    by_count = tl.full([], -2147483648, tl.int32)
    mass_k = tl.full([], 0.0, tl.float32)
    for goal in tl.static_range(2):
        found = tl.full([], 0, tl.int32)
        is_on = k < vocabulary if goal == 0 else p < 1.0
        if is_on:
            if goal == 1:
                for start in range(0, vocabulary, CHUNK):
                    score = _scores(
                        logits, row, start + offset, vocabulary, logits_stride, state, state_stride,
                        inv_temperature, inv_temperature, allowed, stops, HAS_MASK, False, STOPS,
                    )  # fmt: skip
                    weight = tl.where(_rank(score) >= by_count, tl.exp(score - top), 0.0)
                    mass_k += tl.sum(weight, 0)
            # the sign first, then bit by bit; a trial keeps the bit if enough scores are at or above it
            found = tl.full([], -2147483648, tl.int32)
            for step in range(32):
                bit = tl.full([], 1, tl.int32) << (31 - step)
                trial = tl.where(step == 0, 0, found + bit)
                count = tl.full([], 0, tl.int32)
                mass = tl.full([], 0.0, tl.float32)
                for start in range(0, vocabulary, CHUNK):
                    score = _scores(
                        logits, row, start + offset, vocabulary, logits_stride, state, state_stride,
                        inv_temperature, inv_temperature, allowed, stops, HAS_MASK, False, STOPS,
                    )  # fmt: skip
                    is_kept = _rank(score) >= trial
                    if goal == 0:
                        count += tl.sum(is_kept.to(tl.int32), 0)
                    else:
                        is_kept = is_kept & (_rank(score) >= by_count)
                        mass += tl.sum(tl.where(is_kept, tl.exp(score - top), 0.0), 0)
                is_enough = count >= k if goal == 0 else mass >= p * mass_k
                found = tl.where(is_enough, trial, found)
            if goal == 0:
                by_count = found
            floor = tl.maximum(floor, _score_of(found))
    tl.store(floors + row, tl.minimum(floor, top))


def truncation_floors(
    logits: Tensor,
    state: Tensor,
    inv_temperature: Tensor,
    stops: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    allowed: Tensor | None = None,
) -> Tensor:
    """[B], the `floors` of `draw`; top_k V, top_p 1 and min_p 0 switch each of them off."""
    batch, vocabulary = logits.shape
    floors = torch.empty(batch, dtype=torch.float32, device=logits.device)
    _floors[(batch,)](
        logits,
        logits.stride(0),
        state,
        state.stride(0),
        inv_temperature,
        floors if allowed is None else allowed.view(torch.uint8),
        stops,
        top_k,
        top_p,
        min_p,
        floors,
        vocabulary=vocabulary,
        CHUNK=CHUNK,
        HAS_MASK=allowed is not None,
        STOPS=stops.shape[1],
        num_warps=8,
    )
    return floors
