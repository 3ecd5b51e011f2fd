"""Estimates of KL(policy || reference) from the log-probs of one sampled token.

With d = logp - ref, the mean over tokens drawn from the policy is the KL for k1 and k3, and
nearly for k2. d = 0.5: k1 0.5, k2 0.125, k3 e^-0.5 + 0.5 - 1 = 0.107. As a loss, k2 has the KL's
own gradient on policy data, k3 a close one, and k1 one that is zero on average: k1 belongs into a
reward. None of them is clamped: the token that has drifted furthest is pulled back hardest. Only the
exponential of k3 is continued by its tangent where it would overflow (d < -20):

    d     -30                -5      0   5      30
    k1    -30                -5      0   5      30
    k2    450                12.5    0   12.5   450
    k3    11 e^20 - 31       142.4   0   4.007  29       slope 1 - e^20 at d = -30
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

KL_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: 0.5 * d.square(),
    "k3": lambda d: finite_exp(-d) + d - 1,
}


def kl(logp: Tensor, ref: Tensor, kind: str = "k3") -> Tensor:
    """Per token; positive where the policy has moved away (k1 on average, k2 and k3 always)."""
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
