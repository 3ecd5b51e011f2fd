"""A replayed step: what was compared, and the first difference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graft.replay.comparison import DIFFERS, NOT_LEARNED, StepDifference


@dataclass(frozen=True, slots=True)
class OtherSettings:
    """The step under other settings."""

    overrides: list[str]
    metrics: dict[str, float]
    cosine: float
    """Cosine of the two gradients of the first update; 1 means the same direction."""


@dataclass(slots=True)
class Replay:
    """A replayed step."""

    run: Path
    step: int
    checkpoint: str
    inexact: str
    """Why results need not be bit-equal here; "" if they must be."""
    tolerance: float
    """Relative; 0: to the last bit."""
    findings: list[StepDifference] = field(default_factory=list[StepDifference])
    recorded: dict[str, float] = field(default_factory=dict[str, float])
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    other: OtherSettings | None = None

    @property
    def first(self) -> StepDifference | None:
        """The first difference."""
        return next((f for f in self.findings if f.verdict == DIFFERS), None)

    def to_json(self) -> dict[str, Any]:
        first, other = self.first, self.other
        return {
            "run": str(self.run),
            "step": self.step,
            "checkpoint": self.checkpoint,
            "same": first is None,
            "exact": not self.inexact,
            "tolerance": self.tolerance,
            "first": None if first is None else first._asdict(),
            "findings": [finding._asdict() for finding in self.findings],
            "metrics": _beside(self.recorded, self.metrics),
            "asked": other
            and {
                "overrides": other.overrides,
                "metrics": _beside(self.recorded, other.metrics),
                "gradientcosine": _finite(other.cosine),
            },
        }


def _beside(
    recorded: Mapping[str, float], now: Mapping[str, float]
) -> dict[str, dict[str, float | None]]:
    return {
        name: {"recorded": _finite(recorded.get(name, math.nan)), "now": _finite(value)}
        for name, value in now.items()
        if not name.startswith(NOT_LEARNED)
    }


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
