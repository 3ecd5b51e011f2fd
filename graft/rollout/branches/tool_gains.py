"""The average gain of forcing each tool, and the probability of forcing it next.

A moving average per tool of R(y') - R(y), the gain of counterfactual attempts over their twins:

    compare  0.001 -> 0.9 * 0.001 + 0.1 * 0.5 = 0.0509     half of the rewritten attempts succeeded
    swap     0.001
    chances  exp(0.0509 / 0.0509) : exp(0.001 / 0.0509) = 2.718 : 1.020 = 0.727 : 0.273
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

START = 0.001
KEPT = 0.9
"""Of the old average, at each update."""
NOTHING = 1e-5
"""Where the averages sum to less, every tool has the same probability."""


def update(average: float, gains: Sequence[float]) -> float:
    """The average after a step; unchanged without gains, or where one is not finite."""
    if not gains:
        return average
    mean = math.fsum(gains) / len(gains)
    return KEPT * average + (1 - KEPT) * mean if math.isfinite(mean) else average


def chances(averages: Mapping[str, float]) -> dict[str, float]:
    """Probability of each tool, proportional to exp(max(0, average) / largest average)."""
    positive = {tool: max(0.0, average) for tool, average in averages.items()}
    largest = max(positive.values())
    if sum(positive.values()) < NOTHING:
        return dict.fromkeys(averages, 1 / len(averages))
    mass = {tool: math.exp(value / largest) for tool, value in positive.items()}
    total = math.fsum(mass.values())
    return {tool: part / total for tool, part in mass.items()}
