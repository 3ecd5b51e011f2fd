"""Credits that compare the attempts at a task.

N rows, T tokens, L leaves, G groups
"""

from __future__ import annotations

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.credits.credit import Credit, leaves, on_all_tokens
from graft.algos.masked import keep, segment_count, segment_mean, segment_std, segment_sum


def grpo(scale: bool | str = True, unbiased: bool = False, eps: float = 1e-6) -> Credit:
    """A leaf's reward relative to its group: (r - mean) / (std + eps), on all its tokens.

    Rewards 1, 0, 0: 1.414, -0.707, -0.707 (`unbiased` divides by n - 1: 1.155, -0.577, -0.577). A
    leaf counts once, over however many rows it is spread, trained or not. A group of one has mean
    0 and std 1, so its reward is its advantage.

    `scale` "batch" divides by the std of all rewards of the batch, so that a group in which nearly
    all attempts are right does not weigh more than others; False does not divide.
    """
    if scale not in (True, False, "group", "batch"):
        raise ValueError(f"grpo(scale={scale!r}): give 'group' (or true), 'batch' or false")

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        leaf_N, reward_L, group_L, num_groups = leaves(batch)
        better_L = above_mean(reward_L, group_L, num_groups)
        if scale == "batch":
            better_L = better_L / (segment_std(reward_L, 0 * group_L, 1, unbiased) + eps)
        elif scale:
            alone_G = segment_count(group_L, num_groups) == 1
            std_G = segment_std(reward_L, group_L, num_groups, unbiased).masked_fill(alone_G, 1.0)
            better_L = better_L / (std_G[group_L] + eps)
        return on_all_tokens(better_L[leaf_N], batch)

    return credit


def above_mean(x_L: Tensor, group_L: Tensor, num_groups: int) -> Tensor:
    """[L] each entry minus the mean of its group; alone in its group it stays as it is."""
    alone_G = segment_count(group_L, num_groups) == 1
    return x_L - segment_mean(x_L, group_L, num_groups).masked_fill(alone_G, 0.0)[group_L]


def dr_grpo() -> Credit:
    """GRPO without the division, which favours groups that are nearly always right or wrong."""
    return grpo(scale=False)


def rloo() -> Credit:
    """The reward minus the mean of the others in the group. Rewards 1, 0, 0: 1, -0.5, -0.5.

    Alone in its group, a leaf has nothing to be compared with and keeps its reward, as in `grpo`.
    """

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        leaf_N, reward_L, group_L, num_groups = leaves(batch)
        count_L = segment_count(group_L, num_groups)[group_L]
        # r - (sum - r)/(n-1) = (r - mean) * n/(n-1), which is exactly 0 in a flat group
        mean_L = segment_mean(reward_L, group_L, num_groups)[group_L]
        better_L = (reward_L - mean_L) * count_L / (count_L - 1).clamp(min=1)
        return on_all_tokens(torch.where(count_L > 1, better_L, reward_L)[leaf_N], batch)

    return credit


def cpo(eps: float = 1e-6) -> Credit:
    """The gain of a forced call, on all tokens of the counterfactual row: R(y') - R(y).

    Rewards 1, 0, 0 and a counterfactual 1 of the second: 1.155, -0.577, -0.577 and 1. Every other
    row is compared with its group as in `grpo(unbiased=True)`, where counterfactual leaves, which
    are not the policy's own doing, count neither in the mean nor in the std.
    """
    among_themselves = grpo(unbiased=True, eps=eps)

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        rewritten_N = batch.twin_reward.isfinite()
        own = batch.rows(~rewritten_N)
        gain_N = keep(batch.reward.float() - batch.twin_reward, rewritten_N)
        out_NT = on_all_tokens(gain_N, batch)
        out_NT[~rewritten_N] = among_themselves(own.zeros(), own)
        return out_NT

    return credit


def opo() -> Credit:
    """The reward minus the length-weighted mean of the group, the baseline of least variance if the
    squared gradient of an attempt grows with its length (OPO).

    Rewards 1, 0, 0 of attempts of 2, 1 and 1 trained tokens: the baseline is 2/4, A is 0.5, -0.5, -0.5
    """

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        leaf_N, reward_L, group_L, num_groups = leaves(batch)
        length_L = segment_sum(batch.lengths, leaf_N, reward_L.numel()).float()
        length_G = segment_sum(length_L, group_L, num_groups)
        # from the mean, so that a flat group has exactly 0
        better_L = above_mean(reward_L, group_L, num_groups)
        longer_G = segment_sum(length_L * better_L, group_L, num_groups) / length_G.clamp(min=1)
        alone_G = segment_count(group_L, num_groups) == 1
        return on_all_tokens((better_L - keep(longer_G, ~alone_G)[group_L])[leaf_N], batch)

    return credit


def gpg(norm: float = 1.0, valid: str = "advantages") -> Credit:
    """The reward minus the mean of the group, times alpha = B / V: of the B leaves of the batch only V
    have a gradient, and the others must not make the mean over the batch smaller (GPG).

    Two groups with rewards 1, 0 and 1, 1: V is 2 of 4, alpha 2, A is 1, -1 and 0, 0

    V counts leaves whose advantage is not 0, or with `valid` "rewards" those whose reward is not 0, as
    verl does. `norm` divides.
    """
    if valid not in ("advantages", "rewards"):
        raise ValueError(f"gpg(valid={valid!r}): give 'advantages' or 'rewards'")

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        leaf_N, reward_L, group_L, num_groups = leaves(batch)
        better_L = above_mean(reward_L, group_L, num_groups)
        num_valid = (better_L if valid == "advantages" else reward_L).count_nonzero().clamp(min=1)
        return on_all_tokens((better_L * better_L.numel() / num_valid / norm)[leaf_N], batch)

    return credit


def maxrl(eps: float = 1e-6) -> Credit:
    """(r - mean) / (mean + eps) over the group: the gradient of the log of the share that is right, to
    the order that the size of the group allows (MaxRL).

    Rewards 1, 0, 0: 2, -1, -1. Rewards 1, 1, 0: 0.5, 0.5, -1. A hard task weighs more than in `grpo`.
    Rewards must not be negative: they take the place of a probability.
    """

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        leaf_N, reward_L, group_L, num_groups = leaves(batch)
        if (reward_L < 0).any():
            raise ValueError(
                f"the credit maxrl divides by the mean reward of a group, and a reward is "
                f"{float(reward_L.min()):g}; use rewards from 0 on and no penalties (algo.overlong, "
                "algo.kl_in=reward), or the credit grpo"
            )
        alone_G = segment_count(group_L, num_groups) == 1
        mean_G = segment_mean(reward_L, group_L, num_groups).masked_fill(alone_G, 1.0)
        better_L = above_mean(reward_L, group_L, num_groups) / (mean_G[group_L] + eps)
        return on_all_tokens(better_L[leaf_N], batch)

    return credit
