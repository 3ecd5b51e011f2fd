"""Runs that differ in the seed alone as one curve: the mean at each step, and how far the seeds spread.

    seed 0   step [1, 2, 3]   reward [0.2, 0.4, 0.6]
    seed 1   step [1, 2]      reward [0.4, 0.8]

    step [1, 2, 3]   mean [0.3, 0.6, 0.6]   low [0.2, 0.4, 0.6]   high [0.4, 0.8, 0.6]
    std [0.141, 0.283, 0.0]   count [2, 2, 1]

A step is averaged over the runs that have the number there: `count` of them. `std` is the sample's (n - 1).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from graft.runs.curves import Curves


@dataclass(frozen=True, slots=True)
class SeedSpread:
    """One metric over several runs, step by step; steps that no run has a finite number for are left out."""

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
