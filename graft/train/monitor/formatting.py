"""Numbers and text for display: pure functions from values to strings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

BARS = "▁▂▃▄▅▆▇█"
CLIP = 1200
"""Characters of one span that a transcript shows."""


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as a row of bars between minimum and maximum; more than `width` are averaged.

    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8)
    '▁▂▃▄▅▆▇█'
    >>> sparkline([0, 0, 7, 7], 2)
    '▁█'

    Equal values draw a middle line; a value that is not finite leaves a gap.
    """
    if width < 1:
        raise ValueError(f"width={width}: a sparkline needs at least one column")
    count = min(width, len(values))
    edges = [column * len(values) // count for column in range(count + 1)] if count else []
    columns = [_mean(values[a:b]) for a, b in pairwise(edges)]
    finite = [value for value in columns if math.isfinite(value)]
    if not finite:
        return " " * count
    low, high = min(finite), max(finite)
    reach = high / 2 - low / 2  # halves, because high - low may overflow

    def bar(value: float) -> str:
        share = (value / 2 - low / 2) / reach if reach else 0.4
        return BARS[round(share * (len(BARS) - 1))]

    return "".join(bar(value) if math.isfinite(value) else " " for value in columns)


def clock_face(seconds: float) -> str:
    """75 -> "1:15", 3675 -> "1:01:15"; unknown is "?"."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def score(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def clip(text: str, limit: int = CLIP) -> str:
    """Shorten long text to its beginning and end."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} more characters …\n{text[-half:]}"


def _mean(values: Sequence[float]) -> float:
    if not all(math.isfinite(value) for value in values):
        return math.nan
    return math.fsum(value / len(values) for value in values)
