"""The credit of several rewards that are compared apart.

N rows, T tokens, L leaves, G groups, M parts of leaves
"""

from __future__ import annotations

from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.credits.credit import Credit, leaves, on_all_tokens
from graft.algos.credits.groups import above_mean
from graft.algos.masked import first_of, segment_count, segment_std

MIN_REST = 1e-5
"""Less than this beside the weighted sum is rounding."""


def gdpo(scale: bool = True, unbiased: bool = False, eps: float = 1e-6) -> Credit:
    """Each reward of a weighted sum relative to its group by itself, then the weighted sum of these:
    A = sum_k w_k (r_k - mean_k) / (std_k + eps)   (GDPO; published with `whiten` behind it)

    rewards (1, 0), (0, 0.1), (0, 0) of one group, weights 1 and 1:
    grpo of the sum  1.408, -0.594, -0.814     the second reward is lost beside the first
    gdpo             0.707,  0.707, -1.414     both count the same

    The weights are those of `task.reward`. What a shaping has added to the sum is one more reward, of
    weight 1. A leaf that is alone with a reward in its group keeps it.
    """

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        source = (
            "the credit gdpo compares the rewards of a sum one by one: give task.reward a list of two or "
            "more, or take the credit grpo"
        )
        parts_NP = batch.need("part_rewards", source).float()
        weights_NP = batch.need("part_weights", source).float()
        leaf_N, reward_L, group_L, num_groups = leaves(batch)
        row_L = first_of(leaf_N, reward_L.numel())
        total_L = reward_L * 0
        rest_L = reward_L
        for part_L, weight_L in zip(parts_NP[row_L].T, weights_NP[row_L].T, strict=True):
            has_L = part_L.isfinite()
            weighted_L = weight_L[has_L] * part_L[has_L]
            rest_L = rest_L.index_add(0, has_L.nonzero()[:, 0], -weighted_L)
            total_L[has_L] += weight_L[has_L] * compared(part_L[has_L], group_L[has_L], num_groups)
        if (rest_L.abs() > MIN_REST * reward_L.abs().clamp(min=1)).any():
            total_L += compared(rest_L, group_L, num_groups)
        return on_all_tokens(total_L[leaf_N], batch)

    def compared(part_M: Tensor, group_M: Tensor, num_groups: int) -> Tensor:
        better_M = above_mean(part_M, group_M, num_groups)
        if not scale:
            return better_M
        alone_G = segment_count(group_M, num_groups) == 1
        std_G = segment_std(part_M, group_M, num_groups, unbiased).masked_fill(alone_G, 1.0)
        return better_M / (std_G[group_M] + eps)

    return credit
