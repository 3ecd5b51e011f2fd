"""Losses: pure functions (logp_NT, entropy_NT, batch) -> (loss_NT, metrics), never reduced.

    N rows, T tokens

`logp_NT` and `entropy_NT` are the learner's, with gradient. A reduction turns loss_NT into a
number; the metrics are per token too, without gradient, and the learner averages them over the
trained tokens of the whole batch. Nothing here depends on how rows are split, and values outside
the mask (-inf, NaN) have no effect on value or gradient.

The old policy is `batch.old_logprobs`. Without them there is one update per batch, and the old
policy is the current one: ratio 1, gradient of -A * logp.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.kl import bounded, check_kind, kl
from graft.algos.masked import keep, masked_mean

Metrics = dict[str, Tensor]
"""Name -> [N, T], detached, 0 where masked."""

Loss = Callable[[Tensor, Tensor, Batch], tuple[Tensor, Metrics]]

ROW_LOG_RATIO = 10.0
"""Upper bound of GSPO's mean log-ratio of a row, as in verl: e^10 is finite."""


def reinforce() -> Loss:
    """-A * logp: advantage 2 on a token pushes its log-prob up with weight 2."""

    def loss(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        loss_NT = -_advantages(batch) * keep(logp_NT, batch.mask)
        return loss_NT, _metrics(loss_NT, entropy_NT, batch)

    return loss


def sft() -> Loss:
    """-logp of the data's tokens; advantages are not read."""

    def loss(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        loss_NT = -keep(logp_NT, batch.mask)
        return loss_NT, _metrics(loss_NT, entropy_NT, batch)

    return loss


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
    """As `clip` to the bit, but a good token that has risen beyond 1+high keeps a gradient (AEPO).

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


def gspo(low: float = 3e-4, high: float = 4e-4) -> Loss:
    """As `clip`, with one ratio per row: the geometric mean of its tokens' ratios.

    Ratios 1.21 and 1.0 in a row: 1.1 for both. The gradient takes the token form (value of the
    row's ratio, gradient of the token's own log-prob), which for one advantage per row and
    `sequence` reduction is the gradient of the row's ratio, and also serves advantages that
    differ by token.
    """
    _check_range(low, high)

    def loss(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        adv_NT = _advantages(batch)
        logp_NT = keep(logp_NT, batch.mask)
        gap_NT = logp_NT.detach() - keep(_old(logp_NT, batch), batch.mask)
        # unclipped tokens: a clipped one would change the mean of its row
        row_N = masked_mean(gap_NT, batch.mask, dim=1).clamp(max=ROW_LOG_RATIO)
        ratio_NT = torch.exp(row_N[:, None] + logp_NT - logp_NT.detach())
        loss_NT = _worse(ratio_NT, ratio_NT.clamp(1 - low, 1 + high), adv_NT)
        metrics = _metrics(loss_NT, entropy_NT, batch)
        return loss_NT, metrics | _clip_metrics(ratio_NT, adv_NT, low, high)

    return loss


def cispo(low: float = 1.0, high: float = 4.0) -> Loss:
    """-sg(clamp(r, 1-low, 1+high)) * A * logp: the weight is clipped, no token loses its gradient.

    r = 6, A = 1, high = 4: gradient 5 on the log-prob, where `clip` would give none. low = 1
    leaves the weight without a lower bound.
    """
    _check_range(low, high)

    def loss(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        adv_NT = _advantages(batch)
        logp_NT = keep(logp_NT, batch.mask)
        ratio_NT = torch.exp(_log_ratio(logp_NT, batch).detach())
        loss_NT = -ratio_NT.clamp(1 - low, 1 + high) * adv_NT * logp_NT
        metrics = _metrics(loss_NT, entropy_NT, batch)
        return loss_NT, metrics | _clip_metrics(ratio_NT, adv_NT, low, high)

    return loss


def with_importance(loss: Loss, cap: float | None) -> Loss:
    """Weigh each token by min(pi_old / pi_behaviour, cap), since engine and learner differ slightly.

    Engine log-prob -2, learner -1, cap 2: weight min(e, 2) = 2. Wrap the policy loss itself and
    put KL and entropy around it: they are not expectations under the engine. No cap (None or 0):
    no weights.
    """
    if not cap:
        return loss

    def weighted(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        loss_NT, metrics = loss(logp_NT, entropy_NT, batch)
        gap_NT = keep(_old(logp_NT, batch) - batch.logprobs, batch.mask)
        weight_NT = keep(torch.exp(bounded(gap_NT)).clamp(max=cap), batch.mask)
        loss_NT = loss_NT * weight_NT
        return loss_NT, metrics | {
            "loss/policy": loss_NT.detach(),
            "sampling/importance_sampling_ratio/mean": weight_NT,
            "sampling/importance_sampling_ratio/mean_square": weight_NT.square(),
        }

    return weighted


def with_kl(loss: Loss, coef: float, kind: str = "k3") -> Loss:
    """Plus coef * KL(policy || reference) on every trained token.

    The reference has no actions beyond the vocabulary. Where one was chosen there is no KL; where a
    token was chosen, the policy is renormalised to tokens: with probabilities 0.6 of a, 0.2 of b and
    0.2 of an action, 0.6 / (0.6 + 0.2) = 0.75 of a is compared with the reference.
    """
    check_kind(kind)

    def held(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        ref_NT = batch.need("ref_logprobs", "a KL term compares with a reference: compute them")
        loss_NT, metrics = loss(logp_NT, entropy_NT, batch)
        held_NT = batch.mask if batch.is_vocab_token is None else batch.mask & batch.is_vocab_token
        if batch.vocab_logprobs is not None:
            logp_NT = keep(logp_NT, held_NT) - keep(batch.vocab_logprobs, held_NT)
        kl_NT = kl(keep(logp_NT, held_NT), keep(ref_NT, held_NT), kind)
        return loss_NT + coef * kl_NT, metrics | {"kl": kl_NT.detach()}

    return held


def with_entropy(loss: Loss, coef: float) -> Loss:
    """Minus coef * entropy on every trained token: higher entropy is rewarded."""

    def spread(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        loss_NT, metrics = loss(logp_NT, entropy_NT, batch)
        return loss_NT - coef * keep(entropy_NT, batch.mask), metrics

    return spread


def value_loss(values_NT: Tensor, batch: Batch, clip: float | None = None) -> Tensor:
    """Half the squared error of a critic; with `clip`, the larger of it and that of a value clamped
    to +-clip around the old one, so that one batch cannot move the critic far.

    old 0, now 2, return 3, clip 0.5: max((2-3)^2, (0.5-3)^2) / 2 = 3.125, no gradient
    """
    returns_NT = keep(batch.need("returns", "a critic learns them: fill them first"), batch.mask)
    values_NT = keep(values_NT, batch.mask)
    error_NT = (values_NT - returns_NT).square()
    if clip is not None:
        old_NT = keep(batch.need("values", "value clipping needs them"), batch.mask)
        held_NT = old_NT + (values_NT - old_NT).clamp(-clip, clip)
        error_NT = torch.maximum(error_NT, (held_NT - returns_NT).square())
    return 0.5 * error_NT


LOSSES: dict[str, Callable[..., Loss]] = {
    "reinforce": reinforce,
    "clip": clip,
    "balanced_clip": balanced_clip,
    "gspo": gspo,
    "cispo": cispo,
    "sft": sft,
}


def _advantages(batch: Batch) -> Tensor:
    return keep(batch.need("advantages", "a policy loss needs them: run a credit"), batch.mask)


def _old(logp_NT: Tensor, batch: Batch) -> Tensor:
    return logp_NT.detach() if batch.old_logprobs is None else batch.old_logprobs


def _log_ratio(logp_NT: Tensor, batch: Batch) -> Tensor:
    # masked one by one: the difference of two -inf has a NaN gradient that no later mask removes
    old_NT = keep(_old(logp_NT, batch), batch.mask)
    return bounded(keep(logp_NT, batch.mask) - old_NT)


def _clipping(
    hold: Callable[[Tensor], Tensor], low: float, high: float, dual: float | None
) -> Loss:
    """PPO's loss; `hold` keeps a token's ratio within [1 - low, 1 + high]."""
    _check_range(low, high)
    if dual is not None and dual <= 1 + high:
        raise ValueError(f"dual={dual} must be more than 1 + high = {1 + high}; null leaves it out")

    def loss(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        adv_NT = _advantages(batch)
        ratio_NT = torch.exp(_log_ratio(logp_NT, batch))
        loss_NT = _worse(ratio_NT, hold(ratio_NT), adv_NT)
        if dual is not None:
            loss_NT = torch.where(adv_NT < 0, torch.minimum(loss_NT, -adv_NT * dual), loss_NT)
        metrics = _metrics(loss_NT, entropy_NT, batch)
        return loss_NT, metrics | _clip_metrics(ratio_NT, adv_NT, low, high)

    return loss


def _worse(ratio_NT: Tensor, held_NT: Tensor, adv_NT: Tensor) -> Tensor:
    """The larger loss of a ratio and of its clipped value: clipping never lowers a loss."""
    return torch.maximum(-adv_NT * ratio_NT, -adv_NT * held_NT)


def _check_range(low: float, high: float) -> None:
    if not 0 <= low <= 1 or high < 0:
        raise ValueError(
            f"low={low}, high={high}: ratios are clipped to [1 - low, 1 + high]; "
            "give 0 <= low <= 1 and high >= 0"
        )


def _metrics(loss_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> Metrics:
    return {
        "loss/policy": loss_NT.detach(),
        "entropy": keep(entropy_NT.detach(), batch.mask),
    }


def _clip_metrics(ratio_NT: Tensor, adv_NT: Tensor, low: float, high: float) -> Metrics:
    """Tokens that moved beyond the range in the direction of their advantage."""
    low_NT = (ratio_NT < 1 - low) & (adv_NT < 0)
    high_NT = (ratio_NT > 1 + high) & (adv_NT > 0)
    return {
        "clip_ratio/low_mean": low_NT.float(),
        "clip_ratio/high_mean": high_NT.float(),
        "clip_ratio/region_mean": (low_NT | high_NT).float(),
    }
