"""Losses of the log-prob itself: policy gradient, cross-entropy, and a quadratic penalty."""

from __future__ import annotations

from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.losses.loss import Loss, Metrics, advantages, old_logprobs, policy_metrics
from graft.algos.masked import keep


def reinforce() -> Loss:
    """-A * logp: advantage 2 on a token pushes its log-prob up with weight 2."""

    def loss(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        loss_NT = -advantages(batch) * keep(logp_NT, batch.mask)
        return loss_NT, policy_metrics(loss_NT, entropy_NT, batch)

    return loss


def sft() -> Loss:
    """-logp of the data's tokens; advantages are not read."""

    def loss(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        loss_NT = -keep(logp_NT, batch.mask)
        return loss_NT, policy_metrics(loss_NT, entropy_NT, batch)

    return loss


def dro(beta: float = 0.1) -> Loss:
    """-A * logp + beta / 2 * (logp - old)^2: no clipping, every step away from the old policy costs (DRO).

    A = 1, beta = 0.1: the gradient on the log-prob is -1 where nothing has moved, -0.9 at a log-ratio of 1,
    and 0 at 10, where a token with this advantage stays.
    """
    if beta <= 0:
        raise ValueError(
            f"dro(beta={beta}): the penalty needs a weight above 0; without: reinforce"
        )

    def loss(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        logp_NT = keep(logp_NT, batch.mask)
        moved_NT = logp_NT - keep(old_logprobs(logp_NT, batch), batch.mask)
        loss_NT = 0.5 * beta * moved_NT.square() - advantages(batch) * logp_NT
        return loss_NT, policy_metrics(loss_NT, entropy_NT, batch)

    return loss
