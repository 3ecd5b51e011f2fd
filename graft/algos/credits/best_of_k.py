"""Credits for the best of k attempts at a task, in place of the average one.

N rows, T tokens, L leaves, G groups
"""

from __future__ import annotations

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.credits.credit import Credit, leaves, on_all_tokens
from graft.algos.masked import segment_count, segment_std, segment_sum


def grpo_passk(scale: bool = True, unbiased: bool = True, eps: float = 1e-6) -> Credit:
    """Only the best leaf of a group has an advantage: what it earned more than the second best, which
    is what the group would earn without it. Divided by the group's std with `scale`.

    Rewards 1, 0.4, 0 without `scale`: 0.6, 0, 0. Two best leaves: 0 for all.
    Alone in its group, a leaf keeps its reward.
    """

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        leaf_N, reward_L, group_L, num_groups = leaves(batch)
        count_G = segment_count(group_L, num_groups)
        lowest = torch.full((num_groups,), -torch.inf, device=reward_L.device)
        best_G = lowest.scatter_reduce(0, group_L, reward_L, "amax")
        is_best_L = reward_L == best_G[group_L]
        others_L = reward_L.masked_fill(is_best_L, -torch.inf)
        second_G = lowest.scatter_reduce(0, group_L, others_L, "amax")
        # several best ones: without any of them the group earns the same
        is_shared_G = segment_sum(is_best_L.long(), group_L, num_groups) > 1
        gain_G = (best_G - second_G).masked_fill(is_shared_G, 0.0)
        if scale:
            gain_G = gain_G / (segment_std(reward_L, group_L, num_groups, unbiased) + eps)
        gain_G = torch.where(count_G == 1, best_G, gain_G)
        return on_all_tokens((gain_G[group_L] * is_best_L)[leaf_N], batch)

    return credit


def pass_at_k(k: int = 4, right: float = 1.0) -> Credit:
    """The advantage of pass@k, the chance that one of k attempts is right, over all sets of k of the n
    attempts of a group, c of them right (Chen et al. 2025). A leaf is right with a reward of `right`
    or more.

    mean = 1 - C(n - c, k) / C(n, k) and std = sqrt(mean (1 - mean)) of the sets' rewards;
    right: A = (1 - mean) / std;   wrong: A = (1 - mean - C(n - c - 1, k - 1) / C(n - 1, k - 1)) / std

    n = 3, one right, k = 2: mean 2/3, std 0.471, A is 0.707, -0.354, -0.354. Where every set, or none,
    has a right one, A is 0. A group of fewer than k is taken as one set.
    """
    if k < 1:
        raise ValueError(f"pass_at_k(k={k}): k is a number of attempts, 1 or more")

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        leaf_N, reward_L, group_L, num_groups = leaves(batch)
        is_right_L = reward_L >= right - 1e-6
        count_G = segment_count(group_L, num_groups).double()
        wrong_G = segment_sum((~is_right_L).double(), group_L, num_groups)
        size_G = count_G.clamp(max=k)
        none_G = _share_of_sets(wrong_G, count_G, size_G)
        std_G = (none_G * (1 - none_G)).sqrt()
        # the sets of a wrong leaf that no other leaf saves
        lost_G = none_G - _share_of_sets(wrong_G - 1, count_G - 1, size_G - 1)
        value_L = torch.where(is_right_L, none_G[group_L], lost_G[group_L])
        better_L = torch.where(std_G[group_L] > 0, value_L / std_G[group_L], 0.0).float()
        is_alone_L = (count_G == 1)[group_L]
        return on_all_tokens(torch.where(is_alone_L, reward_L, better_L)[leaf_N], batch)

    return credit


def _share_of_sets(part_G: Tensor, whole_G: Tensor, size_G: Tensor) -> Tensor:
    """C(part, size) / C(whole, size): the share of sets that lie in the part. 2 of 3, sets of 2: 1/3"""
    share_G = torch.ones_like(part_G)
    for i in range(int(size_G.max()) if size_G.numel() else 0):
        factor_G = ((part_G - i) / (whole_G - i).clamp(min=1)).clamp(min=0)
        share_G = torch.where(i < size_G, share_G * factor_G, share_G)
    return share_G
