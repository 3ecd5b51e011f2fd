"""Distillation: how far a student's distribution is from a teacher's, and how that is learned.

    N rows, T tokens, C categories: the tokens of a vocabulary, or a few of them and the rest as one

A divergence is a pure function of the log-probs of both, [..., C] each, that returns [...]. Student
(1/2, 1/4, 1/4), teacher (1/4, 1/4, 1/2):

    reverse   KL(student || teacher) = 1/2 ln 2 - 1/4 ln 2 = 0.173    avoids what the teacher would not write
    forward   KL(teacher || student) = 0.173                          covers what the teacher writes
    js        of both to their mean (3/8, 1/4, 3/8): 0.0424           beta = 1/2

Three ways to learn from a teacher:

    credit `teacher_kl`    on the student's own tokens, -(log-prob of the student - of the teacher) is the
                           advantage of each token; alone, or after the credits of rewards
    loss `sampled_kl`      an estimate of the reverse KL from the same tokens, with gradient
    loss `distillation`    the divergence of the whole distributions (`Batch.divergences`);
                           `with_distillation` adds it to another loss
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.kl import check_kind, compared, kl, teacher_gap
from graft.algos.masked import keep

Metrics = dict[str, Tensor]
TokenLoss = Callable[[Tensor, Tensor, Batch], tuple[Tensor, Metrics]]
"""A `losses.loss.Loss`."""

Divergence = Callable[[Tensor, Tensor], Tensor]
"""Log-probs of the student [..., C] and of the teacher [..., C] -> [...], 0 where they are equal."""

Tail = Literal["bucket", "renormalise", "ignore"]
"""Probability outside of the compared tokens. bucket: one more category. renormalise: the compared tokens
sum to 1. ignore: left out, so the result is no divergence and may be negative."""

Support = Literal["teacher", "student", "union"]
"""Whose likeliest tokens are compared."""


def reverse() -> Divergence:
    """KL(student || teacher): what the student would write and the teacher would not is expensive."""
    return lambda student, teacher: _kl(student, teacher)


def forward() -> Divergence:
    """KL(teacher || student): everything that the teacher writes must be likely."""
    return lambda student, teacher: _kl(teacher, student)


def js(beta: float = 0.5) -> Divergence:
    """Generalised Jensen-Shannon (GKD): beta KL(teacher || M) + (1 - beta) KL(student || M), with
    M = beta teacher + (1 - beta) student.

    Its limits for small and large beta, divided by beta and by 1 - beta, are `forward` and `reverse`;
    as in GKD's code, beta = 0 and beta = 1 are these themselves.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"js(beta={beta}): the teacher's share of the mixture must lie in [0, 1]")
    if beta in (0, 1):
        return reverse() if beta else forward()

    def divergence(student: Tensor, teacher: Tensor) -> Tensor:
        both = torch.stack([student + math.log1p(-beta), teacher + math.log(beta)])
        # where neither has a token, logsumexp of two -inf has a NaN gradient
        mixture = both.masked_fill((both == -math.inf).all(0), 0.0).logsumexp(0)
        return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)

    return divergence


DIVERGENCES: dict[str, Callable[..., Divergence]] = {
    "reverse": reverse,
    "forward": forward,
    "js": js,
}


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """sum of P (ln P - ln Q) over the last axis, with 0 ln 0 = 0 and no gradient through -inf."""
    has_mass = p > -math.inf
    log_p, log_q = p.masked_fill(~has_mass, 0.0), q.masked_fill(~has_mass, 0.0)
    return (p.exp() * (log_p - log_q)).sum(-1)


def with_tail(logp: Tensor, tail: Tail, rest: Tensor | None = None) -> Tensor:
    """Log-probs [..., K] of some tokens as a distribution.

    Probabilities 0.6 and 0.2: bucket (0.6, 0.2, 0.2), renormalise (0.75, 0.25), ignore (0.6, 0.2).

    `rest` [..., 1] is the log-prob of all other tokens (`log_rest`). Without it, as for the few tokens that
    a server gives, it is 1 minus their sum, at least 1e-7: a sum in float32 says no more.
    """
    if tail == "ignore":
        return logp
    total = logp.logsumexp(-1, keepdim=True)
    if tail == "renormalise":
        return logp - total
    if rest is None:
        rest = torch.log(-torch.expm1(total.clamp(max=-1e-7)))
    return torch.cat([logp, rest], -1)


def log_rest(logp: Tensor, ids: Tensor, is_given: Tensor | None = None) -> Tensor:
    """[..., 1] the log-prob of all tokens but `ids` [..., K], from log-probs of all of them [..., V].

    The others are added up, so a rest of e^-40 keeps its logarithm; -inf if there are none. Places of `ids`
    where `is_given` is false name no token.
    """
    counts = torch.ones_like(ids) if is_given is None else is_given.to(ids.dtype)
    is_other = torch.zeros_like(logp, dtype=ids.dtype).scatter_add(-1, ids, counts) == 0
    others = logp.masked_fill(~is_other, -math.inf)
    is_empty = (others == -math.inf).all(-1, keepdim=True)
    # logsumexp of -inf alone has a NaN gradient
    rest = others.masked_fill(is_empty, 0.0).logsumexp(-1, keepdim=True)
    return rest.masked_fill(is_empty, -math.inf)


def likeliest_tokens(
    student: Tensor, teacher: Tensor, top_k: int, support: Support, tail: Tail
) -> tuple[Tensor, Tensor]:
    """Both [..., V] as distributions over the `top_k` likeliest tokens of one or each of them, and the rest.

    In a union a token that is among the likeliest of both counts once: its second place is -inf.
    """
    student_ids = student.detach().topk(top_k, -1).indices
    teacher_ids = teacher.topk(top_k, -1).indices
    ids = teacher_ids if support == "teacher" else student_ids
    again = torch.zeros_like(ids, dtype=torch.bool)
    if support == "union":
        is_there = (student_ids[..., :, None] == teacher_ids[..., None, :]).any(-1)
        ids = torch.cat([teacher_ids, student_ids], -1)
        again = torch.cat([again, is_there], -1)

    def over_some(logp: Tensor) -> Tensor:
        rest = log_rest(logp, ids) if tail == "bucket" else None
        return with_tail(logp.gather(-1, ids).masked_fill(again, -math.inf), tail, rest)

    return over_some(student), over_some(teacher)


def teacher_kl(
    coef: float = 1.0, clip: float | None = None, early: float = 0.0
) -> Callable[[Tensor, Batch], Tensor]:
    """Plus coef * (log-prob of the teacher - of the student) of each sampled token.

    Its mean over the student's tokens is -KL(student || teacher). Log-probs -2 and -1 of the student,
    -1 and -3 of the teacher: +1 and -2. `clip` bounds each difference to +-clip. `early` = g weighs a
    token by 1 + g * (1 - the share of the row's absolute differences before it), as IW-OPD: what
    goes wrong first decides the rest. Differences 1 and -2, g = 1: weights 2 and 1 + 2/3.
    """
    if coef < 0 or early < 0 or (clip is not None and clip <= 0):
        raise ValueError(
            f"teacher_kl(coef={coef}, clip={clip}, early={early}): give coef >= 0, early >= 0 and "
            "clip > 0, or clip=null for no bound"
        )

    def credit(advantages_NT: Tensor, batch: Batch) -> Tensor:
        gap_NT = teacher_gap(batch)
        if clip is not None:
            gap_NT = gap_NT.clamp(-clip, clip)
        size_NT = gap_NT.abs()
        before_NT = size_NT.cumsum(1) - size_NT
        total_N1 = size_NT.sum(1, keepdim=True).clamp(min=1e-8)
        weight_NT = 1 + early * (1 - before_NT / total_N1)
        return advantages_NT + coef * weight_NT * gap_NT

    return credit


def sampled_kl(kind: str = "k2") -> TokenLoss:
    """An estimate of KL(student || teacher) from the sampled tokens (see `kl`), with gradient.

    k2 has the KL's own gradient on the student's tokens: 0.5 d^2 of d = log-prob of the student - of
    the teacher.
    """
    check_kind(kind)

    def loss(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        teacher_NT = batch.need("teacher_logprobs", "it comes from a teacher: set distill.teacher")
        held_NT = compared(batch)
        if batch.vocab_logprobs is not None:
            logp_NT = keep(logp_NT, held_NT) - keep(batch.vocab_logprobs, held_NT)
        loss_NT = kl(keep(logp_NT, held_NT), keep(teacher_NT, held_NT), kind)
        return loss_NT, _metrics(loss_NT, entropy_NT, batch)

    return loss


def distillation() -> TokenLoss:
    """The divergence from the teacher, and nothing else; advantages are not read."""

    def loss(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        # where no row has a teacher the divergences are constants; the step then has a gradient of 0
        loss_NT = _divergences(batch) + 0.0 * keep(logp_NT, batch.mask)
        metrics = _metrics(loss_NT, entropy_NT, batch)
        return loss_NT, metrics | {"distill/divergence": loss_NT.detach()}

    return loss


def with_distillation(loss: TokenLoss, coef: float) -> TokenLoss:
    """Plus coef * the divergence from the teacher on every trained token."""

    def guided(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        loss_NT, metrics = loss(logp_NT, entropy_NT, batch)
        div_NT = _divergences(batch)
        return loss_NT + coef * div_NT, metrics | {"distill/divergence": div_NT.detach()}

    return guided


def _metrics(loss_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> Metrics:
    return {"loss/policy": loss_NT.detach(), "entropy": keep(entropy_NT.detach(), batch.mask)}


def _divergences(batch: Batch) -> Tensor:
    div_NT = batch.need("divergences", "it compares with a teacher: set distill.teacher")
    return keep(div_NT, compared(batch))
