"""Losses that bound what one token can do, by its own ratio to the old policy."""

from __future__ import annotations

from collections.abc import Callable

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
from graft.algos.masked import keep


def clip(low: float = 0.2, high: float = 0.2, dual: float | None = None) -> Loss:
    """PPO's clipped ratio r = pi / pi_old: -min(r A, clamp(r, 1-low, 1+high) A).

    A token whose ratio has already passed its bound in the direction of its advantage gets no
    gradient. Unequal low and high is DAPO's clip-higher. `dual` = c bounds the loss of a token with a
    negative advantage at -c A, however likely it has become: A = -1, r = 5, c = 3 costs 3 and gets no
    gradient.
    """

    def hold(ratio_NT: Tensor) -> Tensor:
        return ratio_NT.clamp(1 - low, 1 + high)

    return _clipping(hold, low, high, dual)


def balanced_clip(low: float = 0.2, high: float = 0.2, dual: float | None = 3.0) -> Loss:
    """`clip` to the bit, but a good token that has risen beyond 1+high keeps a gradient (AEPO).

    The upper bound is (1+high) * r / sg(r): its value is 1+high, and it moves with the log-prob.
    Tokens that start a new approach ("However", a search) are rare, rise fast and would be the first
    to lose their gradient. low = high = 0.2, dual = 3; the gradient on the log-prob is -A times

        A, r            1, 1.5     1, 0.5    -1, 1.5    -1, 0.5    -1, 5
        clip            0          0.5       1.5        0          0
        balanced_clip   1.2        0.5       1.5        0          0
    """

    def hold(ratio_NT: Tensor) -> Tensor:
        upper_NT = (1 + high) * (ratio_NT / ratio_NT.detach())  # r / r first: it is exactly 1
        # tensors as bounds: no gradient flows through a number
        return ratio_NT.clamp(torch.full_like(ratio_NT, 1 - low), upper_NT)

    return _clipping(hold, low, high, dual)


def cispo(low: float = 1.0, high: float = 4.0) -> Loss:
    """-sg(clamp(r, 1-low, 1+high)) * A * logp: the weight is clipped, no token loses its gradient.

    r = 6, A = 1, high = 4: gradient 5 on the log-prob, where `clip` would give none. low = 1
    leaves the weight without a lower bound.
    """
    check_clip_range(low, high)

    def loss(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        adv_NT = advantages(batch)
        logp_NT = keep(logp_NT, batch.mask)
        ratio_NT = torch.exp(log_ratio(logp_NT, batch).detach())
        loss_NT = -ratio_NT.clamp(1 - low, 1 + high) * adv_NT * logp_NT
        metrics = policy_metrics(loss_NT, entropy_NT, batch)
        return loss_NT, metrics | clip_metrics(ratio_NT, adv_NT, low, high)

    return loss


def sapo(tau_pos: float = 1.0, tau_neg: float = 1.05) -> Loss:
    """-A * 4 / tau * sigmoid(tau (r - 1)): a soft gate in place of a hard bound (SAPO).

    The gradient on the log-prob is -A r times 4 s (1 - s), s = sigmoid(tau (r - 1)): 1 at r = 1, and less
    the further the ratio is from 1, on both sides. tau = 1, r = 3: 4 * 0.881 * 0.119 = 0.42. Tokens with a
    negative advantage have a steeper gate, since raising all other tokens at once is what destabilises.
    """
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"sapo(tau_pos={tau_pos}, tau_neg={tau_neg}): both must be above 0")

    def loss(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        adv_NT = advantages(batch)
        ratio_NT = torch.exp(log_ratio(logp_NT, batch))
        tau_NT = torch.where(adv_NT > 0, tau_pos, tau_neg)
        loss_NT = -adv_NT * torch.sigmoid(tau_NT * (ratio_NT - 1)) * 4 / tau_NT
        return loss_NT, policy_metrics(loss_NT, entropy_NT, batch)

    return loss


def dppo(divergence: str = "tv", low: float = 0.15, high: float = 0.15, cap: float = 20.0) -> Loss:
    """-sg(min(r, cap)) A logp, and nothing for a token that already moved too far (DPPO).

    The distance is that of two coins, the token drawn or not: `tv` |p - p_old|, `kl` p_old log(p_old / p) +
    (1 - p_old) log((1 - p_old) / (1 - p)). A token with A > 0 stops `high` above p_old, one with A < 0
    `low` below it. `clip` compares ratios instead, which stops rare tokens early and likely ones late:

        p_old -> p        0.01 -> 0.02        0.6 -> 0.78
        ratio             2: clipped          1.3: clipped
        tv                0.01: trained       0.18: stopped, at 0.15

    The paper recommends 0.15 for tv and 0.05 for kl, measured to the policy that sampled
    (`algo.old_policy: engine`).
    """
    if divergence not in ("tv", "kl"):
        raise ValueError(f"dppo(divergence={divergence!r}): known are tv and kl")
    if low < 0 or high < 0 or cap <= 0:
        raise ValueError(f"dppo(low={low}, high={high}, cap={cap}): none may be negative")

    def loss(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        adv_NT = advantages(batch)
        logp_NT = keep(logp_NT, batch.mask)
        ratio_NT = torch.exp(log_ratio(logp_NT, batch).detach())
        new_NT, old_NT = logp_NT.detach(), keep(old_logprobs(logp_NT, batch), batch.mask)
        gain_NT = new_NT.exp() - old_NT.exp()
        far_NT = gain_NT.abs() if divergence == "tv" else _coin_kl(old_NT, new_NT)
        is_high_NT = (adv_NT > 0) & (gain_NT > 0) & (far_NT > high)
        is_low_NT = (adv_NT <= 0) & (gain_NT < 0) & (far_NT > low)
        trained_NT = ~(is_high_NT | is_low_NT)
        loss_NT = -ratio_NT.clamp(max=cap) * adv_NT * logp_NT * trained_NT
        return loss_NT, policy_metrics(loss_NT, entropy_NT, batch) | clip_shares(
            is_low_NT & (adv_NT < 0), is_high_NT
        )

    return loss


def _coin_kl(old_NT: Tensor, new_NT: Tensor) -> Tensor:
    """KL(old || new) between drawing a token and not drawing it."""
    p_NT, q_NT, tiny = old_NT.exp(), new_NT.exp(), 1e-8
    rest_NT = (1 - p_NT) * torch.log((1 - p_NT + tiny) / (1 - q_NT + tiny))
    return p_NT * (old_NT - new_NT) + rest_NT


def _clipping(
    hold: Callable[[Tensor], Tensor], low: float, high: float, dual: float | None
) -> Loss:
    """PPO's loss; `hold` keeps a token's ratio within [1 - low, 1 + high]."""
    check_clip_range(low, high)
    check_dual(dual, high)

    def loss(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        adv_NT = advantages(batch)
        ratio_NT = torch.exp(log_ratio(logp_NT, batch))
        loss_NT = at_most_dual(worse(ratio_NT, hold(ratio_NT), adv_NT), adv_NT, dual)
        metrics = policy_metrics(loss_NT, entropy_NT, batch)
        return loss_NT, metrics | clip_metrics(ratio_NT, adv_NT, low, high)

    return loss
