"""The baseline of least variance for each token.

N rows, T tokens, M trained tokens, L leaves, G groups, S decisions of a leaf
"""

from __future__ import annotations

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.credits.credit import Credit, leaves
from graft.algos.credits.returns import discounted
from graft.algos.credits.steps import grid


def optimal_token_baseline(cap: float | None = None, eps: float = 1e-8) -> Credit:
    """The return minus a baseline for each decision: the mean of the group's returns at its number,
    weighted by how much gradient each leaf has had so far.

    A_s = G_s - B_s, B_s = sum G_s W_s / (sum W_s + eps) over the leaves that have a decision number s,
    W_s the sum over the leaf's decisions up to s of 1 - 2 p + sum of p^2, the squared gradient of the
    log-prob with respect to the logits. Where only one leaf goes on, B is 0.

    Two leaves of one decision, returns 1 and 0, p 0.5 and 0.75 of two tokens (sums of p^2 0.5 and 0.625):
    W 0.5 and 0.125, B = 0.5 / 0.625 = 0.8, A = 0.2 and -0.8

    With `cap` the terms of W are multiplied by the squared importance weight min(p / p_engine, cap)^2.
    The learner computes the sums of p^2 in two passes more.
    """
    to_go = discounted(gamma=1.0, per="token")

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        collisions_NT = batch.need(
            "collisions", "the credit optimal_token_baseline needs the sums of p^2 from the learner"
        )
        logp_NT = batch.logprobs if batch.old_logprobs is None else batch.old_logprobs
        weight_NT = (1 - 2 * logp_NT.exp() + collisions_NT).clamp(min=0)
        if cap is not None:
            weight_NT = weight_NT * (logp_NT - batch.logprobs).exp().clamp(max=cap).square()

        leaf_N, reward_L, group_L, num_groups = leaves(batch)
        order_N = torch.argsort(leaf_N, stable=True)  # rows of a leaf side by side, in their order
        mask_NT = batch.mask[order_N]
        leaf_M = leaf_N[order_N][:, None].expand_as(mask_NT)[mask_NT]
        weight_LS, count_L, column_M = grid(weight_NT[order_N][mask_NT], leaf_M, reward_L.numel())
        return_NT = to_go(adv_NT, batch)[order_N]
        return_LS, _, _ = grid(return_NT[mask_NT], leaf_M, reward_L.numel())
        live_LS = torch.arange(weight_LS.shape[1], device=count_L.device) < count_L[:, None]
        weight_LS = weight_LS.cumsum(1) * live_LS

        # from the least return, so that a flat group has exactly 0
        none_GS = return_LS.new_zeros(num_groups, return_LS.shape[1])
        at_LS = group_L[:, None].expand_as(return_LS)
        least_GS = (none_GS + torch.inf).scatter_reduce(
            0, at_LS, return_LS.masked_fill(~live_LS, torch.inf), "amin"
        )
        above_LS = torch.where(live_LS, return_LS - least_GS[group_L], 0.0)
        weight_GS = none_GS.index_add(0, group_L, weight_LS)
        mean_GS = none_GS.index_add(0, group_L, weight_LS * above_LS) / (weight_GS + eps)
        is_alone_GS = none_GS.index_add(0, group_L, live_LS.float()) < 2
        better_LS = torch.where(is_alone_GS[group_L], return_LS, above_LS - mean_GS[group_L])

        sorted_NT = batch.zeros()
        sorted_NT[mask_NT] = better_LS[leaf_M, column_M]
        out_NT = torch.empty_like(sorted_NT)
        out_NT[order_N] = sorted_NT
        return out_NT

    credit.needs = ("collisions",)  # pyright: ignore[reportFunctionMemberAccess]
    return credit
