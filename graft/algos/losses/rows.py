"""Losses with one ratio per row, in the token form.

The value is that of the row, the gradient that of each token's own log-prob:

    ratio of token t = sg(ratio of the row) * p_t / sg(p_t)

For one advantage per row and `sequence` reduction this is the gradient of the row's ratio; it also serves
advantages that differ by token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.losses.loss import (
    Loss,
    Metrics,
    advantages,
    at_most_dual,
    check_clip_range,
    check_dual,
    clip_metrics,
    clip_shares,
    log_ratio,
    old_logprobs,
    policy_metrics,
    worse,
)
from graft.algos.masked import keep, masked_mean

ROW_LOG_RATIO = 10.0
"""Upper bound of a row's mean log-ratio, as in verl: e^10 is finite, and a row beyond it has no gradient."""

LEAST_LOG_WEIGHT, MAX_LOG_WEIGHT = math.log(1e-8), 20.0
"""Bounds of VESPO's log-ratio of a row, as in TRL."""


def gspo(low: float = 3e-4, high: float = 4e-4, dual: float | None = None) -> Loss:
    """`clip` with one ratio per row: the geometric mean of its tokens' ratios.

    Ratios 1.21 and 1.0 in a row: 1.1 for both.
    """
    check_clip_range(low, high)
    check_dual(dual, high)

    def loss(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        adv_NT = advantages(batch)
        logp_NT = keep(logp_NT, batch.mask)
        gap_NT = logp_NT.detach() - keep(old_logprobs(logp_NT, batch), batch.mask)
        # unclipped tokens: a clipped one would change the mean of its row
        row_N = masked_mean(gap_NT, batch.mask, dim=1)
        ratio_NT = _row_ratio(row_N, logp_NT)
        loss_NT = worse(ratio_NT, ratio_NT.clamp(1 - low, 1 + high), adv_NT)
        loss_NT = at_most_dual(loss_NT, adv_NT, dual)
        metrics = policy_metrics(loss_NT, entropy_NT, batch)
        return loss_NT, metrics | clip_metrics(ratio_NT, adv_NT, low, high)

    return loss


def luspo(low: float = 2e-3, high: float = 2.5e-3, dual: float | None = None) -> Loss:
    """`gspo` times the number of trained tokens of the row (LUSPO), for the reduction `sequence`.

    GSPO divides the gradient of a row by its length, so of two right answers the shorter is learned more.
    Rows of 3 and 1 tokens: each token's gradient has the weight 1/2 here, 1/6 and 1/2 there.
    """
    per_token = gspo(low, high, dual)

    def loss(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        loss_NT, metrics = per_token(logp_NT, entropy_NT, batch)
        loss_NT = loss_NT * batch.lengths[:, None]
        return loss_NT, metrics | {"loss/policy": loss_NT.detach()}

    return loss


def gmpo(low: float = 0.4, high: float = 0.4) -> Loss:
    """The geometric mean of ratios that are clipped token by token (GMPO).

    A token's log-ratio is held at `high` where A > 0 and at -`low` elsewhere; the row's ratio is the
    exponential of their mean. Log-ratios 0.9 and 0.1 with A = 1: exp((0.4 + 0.1) / 2) = 1.28, and only the
    second token has a gradient. `gspo` clips the mean instead, and then stops the whole row.
    """
    if low < 0 or high < 0:
        raise ValueError(f"gmpo(low={low}, high={high}): log-ratios are held in [-low, high]")

    def loss(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        adv_NT = advantages(batch)
        logp_NT = keep(logp_NT, batch.mask)
        gap_NT = logp_NT - keep(old_logprobs(logp_NT, batch), batch.mask)
        held_NT = torch.where(adv_NT > 0, gap_NT.clamp(max=high), gap_NT.clamp(min=-low))
        row_N = masked_mean(held_NT.detach(), batch.mask, dim=1)
        loss_NT = -adv_NT * _row_ratio(row_N, held_NT)
        metrics = policy_metrics(loss_NT, entropy_NT, batch)
        is_low_NT, is_high_NT = (gap_NT < -low) & (adv_NT < 0), (gap_NT > high) & (adv_NT > 0)
        return loss_NT, metrics | clip_shares(is_low_NT, is_high_NT)

    return loss


def vespo(
    k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0
) -> Loss:
    """-phi(w) A logp, phi(w) = w^k e^(lambda (1 - w)), w the product of the row's ratios (VESPO).

    phi(1) = 1; it falls smoothly to 0 on both sides, so a row far from the old policy has little effect and
    no bound cuts it off. k = 2, lambda = 3: phi(0.5) = 1.12, phi(2) = 0.20, phi(4) = 0.002. k and lambda
    depend on the sign of the advantage.
    """
    if min(k_pos, lambda_pos, k_neg, lambda_neg) <= 0:
        raise ValueError(
            f"{k_pos=}, {lambda_pos=}, {k_neg=}, {lambda_neg=}: k and lambda must be above 0, for both "
            "signs of the advantage"
        )

    def loss(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        adv_NT = advantages(batch)
        logp_NT = keep(logp_NT, batch.mask)
        row_N = log_ratio(logp_NT, batch).detach().sum(dim=1)
        log_w_N1 = row_N.clamp(LEAST_LOG_WEIGHT, MAX_LOG_WEIGHT)[:, None]
        k_NT = torch.where(adv_NT >= 0, k_pos, k_neg)
        lambda_NT = torch.where(adv_NT >= 0, lambda_pos, lambda_neg)
        phi_NT = torch.exp(k_NT * log_w_N1 + lambda_NT * (1 - log_w_N1.exp()))
        loss_NT = -phi_NT * adv_NT * logp_NT
        metrics = policy_metrics(loss_NT, entropy_NT, batch)
        return loss_NT, metrics | {"loss/row_weight": keep(phi_NT, batch.mask)}

    return loss


def _row_ratio(row_N: Tensor, x_NT: Tensor) -> Tensor:
    """[N, T] the ratio of a row, whose gradient is that of each token's own `x`."""
    log_NT = row_N[:, None] + (x_NT - x_NT.detach())
    return torch.exp(log_NT.clamp(max=ROW_LOG_RATIO))
