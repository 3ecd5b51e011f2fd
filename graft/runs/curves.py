"""The metrics of a run as columns, out of lines that each hold one step.

{"phase": "rl", "step": 1, "reward": 0.25}
{"phase": "rl", "step": 2, "reward": 0.75, "eval/sampled": 0.5}

steps [1, 2]   reward [0.25, 0.75]   eval/sampled [nan, 0.5]

Runs that differ in the seed alone are one curve: the mean at each step, and how far the seeds spread.

    seed 0   step [1, 2, 3]   reward [0.2, 0.4, 0.6]
    seed 1   step [1, 2]      reward [0.4, 0.8]

    step [1, 2, 3]   mean [0.3, 0.6, 0.6]   low [0.2, 0.4, 0.6]   high [0.4, 0.8, 0.6]
    std [0.141, 0.283, 0.0]   count [2, 2, 1]
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class SeedSpread:
    """One metric over several runs, step by step: `count` of them have a finite number there. `std` is the
    sample's (n - 1)."""

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    std: list[float]
    count: list[int]


def spread(curves: Sequence[tuple[Sequence[int], Sequence[float]]]) -> SeedSpread:
    """The mean and spread of one column of several runs, each with its steps."""
    at: dict[int, list[float]] = defaultdict(list)
    for steps, values in curves:
        for step, value in zip(steps, values, strict=True):
            if math.isfinite(value):
                at[step].append(value)
    steps = sorted(at)
    columns = [at[step] for step in steps]
    return SeedSpread(
        steps,
        [mean_of(column) for column in columns],
        [min(column) for column in columns],
        [max(column) for column in columns],
        [deviation(column) for column in columns],
        [len(column) for column in columns],
    )


def metric_over(runs: Sequence[Curves], metric: str) -> SeedSpread:
    """A metric of the same phase of several runs."""
    return spread([(curves.steps, curves[metric]) for curves in runs if metric in curves])


def mean_of(values: Sequence[float]) -> float:
    return sum(values) / len(values)  # statistics' are exact, and a hundred times slower


def deviation(values: Sequence[float]) -> float:
    """The sample's standard deviation; 0 of a single value.

    >>> deviation([1.0, 2.0, 3.0]), deviation([5.0])
    (1.0, 0.0)
    """
    mean = mean_of(values)
    squares = sum((value - mean) * (value - mean) for value in values)
    return math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else 0.0
