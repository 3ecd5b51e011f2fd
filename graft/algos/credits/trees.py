"""Credits of attempts that share spans.

N rows, T tokens, M played tokens, L leaves, G forks, K spans or segments
"""

from __future__ import annotations

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.credits.credit import Credit, leaves
from graft.algos.credits.groups import above_mean
from graft.algos.masked import (
    first_of,
    keep,
    number,
    segment_count,
    segment_mean,
    segment_std,
)


def share_over_spans() -> Credit:
    """Give each span the mean advantage of the trajectories that pass through it.

    rewards 1, 0, 0 in one group; rows 0 and 1 share span 7:
    grpo    [1.41, 1.41] [-0.71, -0.71] [-0.71, -0.71]
    shared  [0.35, 1.41] [ 0.35, -0.71] [-0.71, -0.71]
    """

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        span_M, num_spans = number(batch.spans[batch.mask])
        mean_K = segment_mean(adv_NT[batch.mask], span_M, num_spans)
        out_NT = torch.zeros_like(adv_NT)
        out_NT[batch.mask] = mean_K[span_M]
        return out_NT

    return credit


def treerpo(scale: bool = True, unbiased: bool = False, eps: float = 1e-6) -> Credit:
    """A segment of the tree against its siblings: (V - mean) / (std + eps), where V, the value of a
    segment, is the mean reward of the leaves behind it (TreeRPO).

    A segment is what lies between two forks, over however many turns; siblings begin at the same fork.
    rewards 1, 0, 0; leaves 0 and 1 share their first token:

    value   [0.5, 1] [0.5, 0] [0, 0]      siblings: 0.5 and 0 at the prompt, then 1 and 0
    A       [1, 1] [1, -1] [-1, -1]       without `scale`: [0.25, 0.5] [0.25, -0.5] [-0.25, -0.25]

    Attempts that share nothing are segments of the prompt: `grpo`. A leaf without siblings anywhere
    keeps its reward.
    """

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        leaf_N, reward_L, group_L, num_groups = leaves(batch)
        order_N = torch.argsort(leaf_N, stable=True)  # rows of a leaf side by side, in their order
        played_NT = (batch.turns >= 0)[order_N]
        span_M = batch.spans[order_N][played_NT]
        leaf_M = leaf_N[order_N][:, None].expand_as(played_NT)[played_NT]

        # R segments as leaves pass through them; the parent of a first one is the prompt, -1 - group
        run_M, start_R = _runs(span_M, leaf_M, reward_L.numel())
        first_R, leaf_R = span_M[start_R], leaf_M[start_R]
        follows_R = leaf_R == leaf_R.roll(1)
        follows_R[:1] = False
        parent_R = torch.where(follows_R, first_R.roll(1), -1 - group_L[leaf_R])
        width = int(first_R.max()) + 1 if len(first_R) else 1
        segment_R, num_segments = number((parent_R + num_groups) * width + first_R)
        value_K = segment_mean(reward_L[leaf_R], segment_R, num_segments)

        fork_R, num_forks = number(parent_R)
        fork_K = fork_R[first_of(segment_R, num_segments)]
        better_K = above_mean(value_K, fork_K, num_forks)
        if scale:
            alone_G = segment_count(fork_K, num_forks) == 1
            std_G = segment_std(value_K, fork_K, num_forks, unbiased).masked_fill(alone_G, 1.0)
            better_K = better_K / (std_G[fork_K] + eps)
        sorted_NT = batch.zeros()
        sorted_NT[played_NT] = better_K[segment_R][run_M]
        out_NT = torch.empty_like(sorted_NT)
        out_NT[order_N] = sorted_NT
        return keep(out_NT, batch.mask)

    return credit


def _runs(span_M: Tensor, leaf_M: Tensor, num_leaves: int) -> tuple[Tensor, Tensor]:
    """[M] the number of the run that each token is in, and [R] where each run begins: the tokens of a
    leaf in one segment. Tokens are sorted by leaf and time.

    The leaves behind a span only become fewer with time, so a segment ends where their number changes.
    """
    span_M, num_spans = number(span_M)
    pair_M, num_pairs = number(span_M * num_leaves + leaf_M)
    num_behind_K = segment_count(span_M[first_of(pair_M, num_pairs)], num_spans)
    num_behind_M = num_behind_K[span_M]
    is_start_M = (leaf_M != leaf_M.roll(1)) | (num_behind_M != num_behind_M.roll(1))
    is_start_M[:1] = True
    return is_start_M.long().cumsum(0) - 1, is_start_M.nonzero()[:, 0]
