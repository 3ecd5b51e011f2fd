"""Coefficients of a KL or entropy term that follow what the policy does from step to step.

A controller owns one number, `value`; the loss reads it by calling the controller, and `update` changes it
after a step, by the step's metrics. Its state is plain JSON: a resumed run continues with the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Coefficient = float | Callable[[], float]
"""A number, or a function that gives the present one."""


def present(coef: Coefficient) -> float:
    return coef if isinstance(coef, int | float) else coef()


@dataclass(slots=True)
class KlController:
    """PPO's adaptive KL coefficient: it rises while the KL is above its target (Ziegler et al. 2019).

    value * (1 + clamp(KL / target - 1, -0.2, 0.2) * rows / horizon): KL 0.3 at a target of 0.1 with 64 rows
    and a horizon of 640 raises 0.1 to 0.1 * (1 + 0.2 * 0.1) = 0.102.
    """

    value: float
    target: float
    horizon: float = 10_000.0
    """Rows after which the coefficient has moved by the error."""

    @classmethod
    def of(cls, value: float, how: Mapping[str, float]) -> KlController:
        return cls(value, **_checked(how, "kl_control", {"target", "horizon"}))

    def __call__(self) -> float:
        return self.value

    def update(self, metrics: Mapping[str, float], rows: int) -> None:
        error = min(max(metrics["kl"] / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * rows / self.horizon

    @property
    def state(self) -> dict[str, Any]:
        return {"value": self.value}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


@dataclass(slots=True)
class EntropyController:
    """An entropy bonus that is paid only while the entropy is at or below its target (Skywork-OR1).

    After a step the coefficient rises by `delta` where the entropy was at or below the target, and falls by
    it elsewhere, within [least, most]. Before the first step nothing is known, and nothing is paid.
    """

    value: float
    target: float
    delta: float = 0.005
    least: float = 0.0
    most: float = 1.0
    entropy: float = math.inf
    """Of the last step."""

    @classmethod
    def of(cls, value: float, how: Mapping[str, float]) -> EntropyController:
        known = {"target", "delta", "least", "most"}
        return cls(value, **_checked(how, "entropy_control", known))

    def __call__(self) -> float:
        return self.value if self.entropy <= self.target else 0.0

    def update(self, metrics: Mapping[str, float], rows: int) -> None:
        self.entropy = metrics["entropy"]
        step = self.delta if self.entropy <= self.target else -self.delta
        self.value = min(max(self.value + step, self.least), self.most)

    @property
    def state(self) -> dict[str, Any]:
        # JSON has no infinity
        return {"value": self.value, "entropy": None if self.entropy == math.inf else self.entropy}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]
        self.entropy = math.inf if state["entropy"] is None else state["entropy"]


def _checked(how: Mapping[str, float], key: str, known: set[str]) -> dict[str, float]:
    if unknown := sorted(how.keys() - known):
        raise ValueError(f"{key} has no {unknown[0]!r}; it has {', '.join(sorted(known))}")
    if how.get("target", 0) <= 0 or how.get("horizon", 1) <= 0:
        raise ValueError(f"{key}={dict(how)}: give a target above 0, as in {{target: 0.1}}")
    if how.get("least", 0.0) > how.get("most", 1.0):
        raise ValueError(f"{key}={dict(how)}: least is more than most (1 where it is left out)")
    return dict(how)


Controller = KlController | EntropyController
