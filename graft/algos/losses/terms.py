"""Terms around a policy loss: weights, KL, entropy; and the loss of a critic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.coefficients import Coefficient, present
from graft.algos.kl import check_kind, kl
from graft.algos.losses.loss import Loss, Metrics, log_ratio
from graft.algos.masked import keep
from graft.algos.weights import BatchWeight, Weight


def with_weights(loss: Loss, weights: Sequence[Weight]) -> Loss:
    """The loss of each token times its weights; without any, the loss itself.

    Engine log-prob -2, learner -1, `importance(cap=2)`: weight min(e, 2) = 2. Wrap the policy loss itself
    and put KL and entropy around it: they are not expectations under the engine.
    """
    if not weights:
        return loss
    of_rows = [one for one in weights if not isinstance(one, BatchWeight)]
    is_whole = len(of_rows) < len(weights)

    def weighted(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        loss_NT, metrics = loss(logp_NT, entropy_NT, batch)
        weight_NT = batch.mask.float()
        if is_whole:
            found_NT = batch.need("weights", "a weight needs the whole batch: prepare it")
            weight_NT = keep(found_NT, batch.mask)
            metrics = metrics | {"weights/mean": weight_NT}
        for weight in of_rows:
            factor_NT, more = weight(logp_NT.detach(), batch)
            weight_NT, metrics = weight_NT * keep(factor_NT, batch.mask), metrics | more
        loss_NT = loss_NT * weight_NT
        return loss_NT, metrics | {"loss/policy": loss_NT.detach()}

    return weighted


def with_kl(loss: Loss, coef: Coefficient, kind: str = "k3", corrected: bool = False) -> Loss:
    """Plus coef * KL(policy || reference) on every trained token.

    The reference has no actions beyond the vocabulary. Where one was chosen there is no KL; where a
    token was chosen, the policy is renormalised to tokens: with probabilities 0.6 of a, 0.2 of b and
    0.2 of an action, 0.6 / (0.6 + 0.2) = 0.75 of a is compared with the reference.

    `corrected` multiplies each estimate by the ratio p / p_old, with its gradient: tokens that the old
    policy drew then have the present policy's KL as their mean, and its gradient (DeepSeek-V3.2).
    """
    check_kind(kind)

    def held(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        ref_NT = batch.need("ref_logprobs", "a KL term compares with a reference: compute them")
        loss_NT, metrics = loss(logp_NT, entropy_NT, batch)
        held_NT = batch.mask if batch.is_vocab_token is None else batch.mask & batch.is_vocab_token
        ours_NT = keep(logp_NT, held_NT)
        if batch.vocab_logprobs is not None:
            ours_NT = ours_NT - keep(batch.vocab_logprobs, held_NT)
        kl_NT = kl(ours_NT, keep(ref_NT, held_NT), kind)
        term_NT = kl_NT * torch.exp(log_ratio(logp_NT, batch)) if corrected else kl_NT
        return loss_NT + present(coef) * term_NT, metrics | {"kl": kl_NT.detach()}

    return held


def with_entropy(loss: Loss, coef: Coefficient) -> Loss:
    """Minus coef * entropy on every trained token: higher entropy is rewarded."""

    def spread(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        loss_NT, metrics = loss(logp_NT, entropy_NT, batch)
        return loss_NT - present(coef) * keep(entropy_NT, batch.mask), metrics

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
