"""Estimates of KL(policy || reference) from the log-probs of one sampled token.

With d = logp - ref, the mean over tokens drawn from the policy is the KL for k1 and k3, and
nearly for k2. d = 0.5: k1 0.5, k2 0.125, k3 e^-0.5 + 0.5 - 1 = 0.107, abs 0.5. As a loss, k2 has the
KL's own gradient on policy data, k3 a close one, and k1 one that is zero on average: k1 belongs into a
reward. `k1+`, `k3+` and `abs+` have the value of the one and the gradient of k2. None of them is clamped:
the token that has drifted furthest is pulled back hardest. Only the exponential of k3 is continued by its
tangent where it would overflow (d < -20):

    d     -30                -5      0   5      30
    k1    -30                -5      0   5      30
    k2    450                12.5    0   12.5   450
    k3    11 e^20 - 31       142.4   0   4.007  29       slope 1 - e^20 at d = -30
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.masked import keep

KL_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: 0.5 * d.square(),
    "k3": lambda d: finite_exp(-d) + d - 1,
    "abs": lambda d: d.abs(),
    "k1+": lambda d: _straight_through("k1", d),
    "k3+": lambda d: _straight_through("k3", d),
    "abs+": lambda d: _straight_through("abs", d),
}


def kl(logp: Tensor, ref: Tensor, kind: str = "k3") -> Tensor:
    """The KL term of each token; positive if the policy has moved away (k1 on average, the others always)."""
    check_kind(kind)
    return KL_KINDS[kind](logp - ref)


def check_kind(kind: str) -> None:
    if kind not in KL_KINDS:
        raise ValueError(f"unknown KL estimate {kind!r}; known: {', '.join(KL_KINDS)}")


def finite_exp(x: Tensor) -> Tensor:
    """exp(x), and beyond 20 its tangent there: finite, and its slope e^20 has the right sign."""
    held = x.clamp(max=20.0)
    return torch.exp(held) * (1 + (x - held))  # the bracket is exactly 1 up to 20


def bounded(log_ratio: Tensor) -> Tensor:
    """Log-ratios within +-20: beyond, exp() grows towards inf, and one token would end the run."""
    return log_ratio.clamp(-20.0, 20.0)


def _straight_through(kind: str, d: Tensor) -> Tensor:
    """The value of `kind`, the gradient of k2."""
    slope = KL_KINDS["k2"](d)
    return KL_KINDS[kind](d).detach() + (slope - slope.detach())


def teacher_gap(batch: Batch) -> Tensor:
    """[N, T] log-prob of the teacher - of the policy that sampled, 0 where nothing is compared.

    A teacher has no actions beyond the vocabulary, so the policy is renormalised to tokens (see `with_kl`).
    """
    teacher_NT = batch.need("teacher_logprobs", "it comes from a teacher: set distill.teacher")
    held_NT = compared(batch)
    gap_NT = keep(teacher_NT, held_NT) - keep(batch.logprobs, held_NT)
    if batch.vocab_logprobs is not None:
        gap_NT = gap_NT + keep(batch.vocab_logprobs, held_NT)
    return gap_NT


def compared(batch: Batch) -> Tensor:
    """[N, T] trained tokens that a teacher has an opinion of: actions beyond the vocabulary it lacks,
    and rows may have no teacher."""
    held_NT = batch.mask if batch.is_vocab_token is None else batch.mask & batch.is_vocab_token
    return held_NT if batch.has_teacher is None else held_NT & batch.has_teacher[:, None]
