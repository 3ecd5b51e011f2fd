"""Shaping of rewards and masks before credit: pure functions Batch -> Batch.

    N rows, T tokens, L leaves

A change of a leaf's total `reward` is made in its per-token `rewards` too, so credits that read
either of them agree.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.coefficients import Coefficient, present
from graft.algos.kl import check_kind, kl
from graft.algos.masked import keep, number, segment_sum

Shaping = Callable[[Batch], Batch]


def shape_in_turn(*shapings: Shaping) -> Shaping:
    """Apply shapings in the given order; without any, the identity."""

    def shape(batch: Batch) -> Batch:
        for shaping in shapings:
            batch = shaping(batch)
        return batch

    return shape


def overlong(max_length: int, buffer: int, penalty: float = 1.0) -> Shaping:
    """Soft penalty for long answers (DAPO): 0 up to max_length - buffer policy tokens, then linear up
    to `penalty` at max_length, and constant beyond.

    max_length 10, buffer 4: 6 tokens -> 0, 8 -> -0.5, 10 -> -1, 12 -> -1

    The tokens of all contexts of a leaf count together; the penalty falls on its last policy token.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"overlong: buffer={buffer} must lie in 1..max_length={max_length}")

    def shape(batch: Batch) -> Batch:
        leaf_N, num_leaves = number(batch.leaf)
        played_NT = batch.turns >= 0
        length_L = segment_sum(played_NT.sum(dim=1), leaf_N, num_leaves)
        excess_L = (length_L - (max_length - buffer)).clamp(0, buffer)
        change_L = -penalty * excess_L / buffer

        # flat positions rise with the row, and rows of a leaf are in order: its last token is the
        # max
        rows, columns = batch.turns.shape
        position_NT = torch.arange(rows * columns, device=leaf_N.device).view(rows, columns)
        leaf_NT = leaf_N[:, None].expand(rows, columns)
        last_L = torch.full_like(length_L, -1).scatter_reduce(
            0, leaf_NT[played_NT], position_NT[played_NT], "amax"
        )
        hit_L = last_L >= 0
        rewards = batch.rewards.flatten().index_add(0, last_L[hit_L], change_L[hit_L])
        return batch.replace(
            reward=batch.reward + change_L[leaf_N], rewards=rewards.view(rows, columns)
        )

    return shape


def mask_truncated() -> Shaping:
    """Rows of truncated attempts are not trained; their rewards still count in their group."""

    def shape(batch: Batch) -> Batch:
        return batch.replace(mask=batch.mask & ~batch.truncated[:, None])

    return shape


def kl_in_reward(coef: Coefficient, kind: str = "k1") -> Shaping:
    """Every trained token pays coef * KL(behaviour || reference); the leaf pays the sum.

    coef 0.1, k1, one row: log-probs [-1, -1], reference [-2, -1] -> rewards [-0.1, 0], reward -0.1
    """
    check_kind(kind)

    def shape(batch: Batch) -> Batch:
        ref_NT = batch.need("ref_logprobs", "kl_in_reward compares with a reference: compute them")
        price_NT = present(coef) * kl(
            keep(batch.logprobs, batch.mask), keep(ref_NT, batch.mask), kind
        )
        leaf_N, num_leaves = number(batch.leaf)
        price_L = segment_sum(price_NT.sum(dim=1), leaf_N, num_leaves)
        return batch.replace(
            rewards=batch.rewards - price_NT, reward=batch.reward - price_L[leaf_N]
        )

    return shape


def behaviour_kl(batch: Batch, kind: str) -> Tensor:
    """[N, T] KL of the policy that sampled to the reference, 0 where masked."""
    ref_NT = batch.need("ref_logprobs", "kl_in_reward compares with a reference: compute them")
    return kl(keep(batch.logprobs, batch.mask), keep(ref_NT, batch.mask), kind)


SHAPINGS: dict[str, Callable[..., Shaping]] = {
    "overlong": overlong,
    "mask_truncated": mask_truncated,
    "kl_in_reward": kl_in_reward,
}
