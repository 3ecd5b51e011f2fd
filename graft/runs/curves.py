"""The metrics of a run as columns, out of lines that each hold one step.

{"phase": "rl", "step": 1, "reward": 0.25}
{"phase": "rl", "step": 2, "reward": 0.75, "eval/sampled": 0.5}

steps [1, 2]   reward [0.25, 0.75]   eval/sampled [nan, 0.5]
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graft.train.run_dir.trackers import PHASES, Phase


@dataclass(slots=True)
class Curves:
    """The metrics of one phase as columns: eight bytes a number, NaN where a step has none."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    columns: dict[str, array[float]] = field(default_factory=dict[str, "array[float]"])

    def add(self, row: Mapping[str, Any]) -> None:
        before = len(self.steps)
        self.steps.append(int(row["step"]))
        for name, value in numbers(row).items():
            column = self.columns.get(name)
            if column is None:
                column = self.columns[name] = array("d")
            if len(column) < before:
                _pad(column, before)
            column.append(value)

    def __getitem__(self, name: str) -> array[float]:
        """One number per step."""
        column = self.columns.get(name, array("d"))
        _pad(column, len(self.steps))
        return column

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __len__(self) -> int:
        return len(self.steps)


def is_step(row: Mapping[str, Any]) -> bool:
    step = row.get("step")
    return row.get("phase") in PHASES and isinstance(step, int) and abs(step) < 2**62


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a line. One that was not finite stands there as null and is NaN again.

    >>> numbers({"phase": "rl", "step": 12, "reward": 0.5, "loss": None, "nonfinite": ["loss"]})
    {'reward': 0.5, 'loss': nan}
    """
    found: dict[str, float] = {}
    for name, value in row.items():
        if type(value) is float:  # nearly all of them
            found[name] = value
        elif name == "step":
            continue
        elif value is None:
            found[name] = math.nan
        elif isinstance(value, int | float):
            try:
                found[name] = float(value)
            except OverflowError:  # an integer of hundreds of digits
                found[name] = math.nan
    return found


def order(phase: Phase, step: int) -> tuple[int, int]:
    """Steps of a run in the order it makes them."""
    return PHASES.index(phase), step


def _pad(column: array[float], length: int) -> None:
    if len(column) < length:
        column.extend([math.nan] * (length - len(column)))
