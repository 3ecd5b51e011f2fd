"""Curves as SVG: what each step gave, pale, and its running mean, strong, over labelled axes.

    curve("reward", steps=[1, 2, 3], values=[0.0, 0.5, 1.0]) -> "<figure>...<svg ...>...</figure>"

A curve of any length is drawn from at most `COLUMNS` columns. The pale line keeps the least and the
greatest value of each column, so that a spike of a single step is not averaged away.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from graft.report.markup import shown

WIDTH, HEIGHT = 420, 200
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 24
COLUMNS = 240
WINDOW = 20
"""The running mean is over a twentieth of the steps."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """From numbers to pixels: `low` lies at `start`, `high` at `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        # halves: high - low may overflow where neither of them does
        share = (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)
        return self.start + share * (self.end - self.start)


def curve(
    title: str,
    steps: Sequence[int],
    values: Sequence[float],
    *,
    marks: Iterable[tuple[int, str]] = (),
    about: str = "",
    more: str = "",
    band: tuple[Sequence[float], Sequence[float]] | None = None,
) -> str:
    """A figure with its last value; `marks` are steps with something to say, `more` is markup.

    `band` are the least and the greatest value at each step, where the curve is a mean of runs.
    """
    pairs = zip(steps, values, strict=True)
    points = [(float(step), value) for step, value in pairs if math.isfinite(value)]
    if not points:
        return ""
    last = f'<span class="last">{number(points[-1][1])}</span>'
    about = f'<span class="about">{shown(about)}</span>' if about else ""
    caption = f"<figcaption><b>{shown(title)}</b> {last}{about}</figcaption>"
    return f"<figure>{caption}{_svg(title, points, marks, _sides(steps, band))}{more}</figure>"


def _sides(
    steps: Sequence[int], band: tuple[Sequence[float], Sequence[float]] | None
) -> list[list[Point]]:
    """The lower and the upper side of a band, as points."""
    return [list(zip(map(float, steps), side, strict=True)) for side in band or ()]


def _svg(
    title: str, points: list[Point], marks: Iterable[tuple[int, str]], sides: list[list[Point]]
) -> str:
    x = Axis(*_span([p[0] for p in points]), LEFT, WIDTH - RIGHT)
    y = Axis(*_span([p[1] for line in (points, *sides) for p in line]), HEIGHT - BOTTOM, TOP)
    smooth = smoothed([p[1] for p in points], max(1, len(points) // WINDOW))
    means = list(zip((p[0] for p in points), smooth, strict=True))
    parts = [*_grid(x, y)]
    if sides:
        low, high = (list(_extremes(side)) for side in sides)
        around = [*high, *reversed(low)]
        parts.append(f'<polygon class="band" points="{_path(around, x, y)}"/>')
    for step, text in marks:
        if x.low <= step <= x.high:
            at = f"{x(step):.1f}"
            parts.append(
                f'<line class="mark" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
                f"<title>step {step}: {shown(text)}</title></line>"
            )
    if len(points) == 1:
        parts.append(f'<circle class="mean" cx="{x(points[0][0]):.1f}" cy="{y(points[0][1]):.1f}"')
        parts[-1] += ' r="3"/>'
    else:
        parts.append(_line("raw", _extremes(points), x, y))
        parts.append(_line("mean", _thinned(means), x, y))
    label = f"{title}, {number(points[0][1])} at first, {number(points[-1][1])} at last"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{shown(label)}</title>'
        f"{''.join(parts)}</svg>"
    )


def _line(kind: str, points: Iterable[Point], x: Axis, y: Axis) -> str:
    return f'<polyline class="{kind}" points="{_path(points, x, y)}"/>'


def _path(points: Iterable[Point], x: Axis, y: Axis) -> str:
    return " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)


def _grid(x: Axis, y: Axis) -> Iterator[str]:
    marked = ticks(y.low, y.high, 4)
    for value in marked:
        at = y(value)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text class="y" x="{LEFT - 6}" y="{at + 3.5:.1f}">{_label(value, marked)}</text>'
    for value in ticks(x.low, x.high, 6):
        if value == int(value):  # there is no step 1.5
            yield f'<text class="x" x="{x(value):.1f}" y="{HEIGHT - 8}">{int(value)}</text>'


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and those before it, `window` in all.

    >>> smoothed([1.0, 2.0, 3.0, 6.0], 2)
    [1.0, 1.5, 2.5, 4.5]
    """
    means: list[float] = []
    total = 0.0
    for index, value in enumerate(values):
        count = min(index + 1, window)
        if index % window == 0:  # anew now and then: a running sum drifts
            total = math.fsum(v / window for v in values[index + 1 - count : index + 1])
        else:
            total += value / window
            total -= values[index - window] / window if index >= window else 0.0
        means.append(total * (window / count))
    return means


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between two others, at most `most`.

    >>> ticks(0, 1, 4), ticks(3, 58, 6)
    ([0.0, 0.5, 1.0], [10.0, 20.0, 30.0, 40.0, 50.0])
    """
    power = 10.0 ** math.floor(math.log10(max(high / most - low / most, 1e-300)))

    def between(unit: float) -> range:
        return range(math.ceil(low / unit - 1e-9), math.floor(high / unit + 1e-9) + 1)

    units = (power * leading for leading in (1, 2, 5, 10, 20))
    unit = next(unit for unit in units if len(between(unit)) <= most)
    return [count * unit for count in between(unit)]


def number(value: float) -> str:
    """
    >>> [number(v) for v in (0.0, 0.5, 12.0, 5512.4, 3.1e-07, 123456789.0)]
    ['0', '0.5', '12', '5,512', '3.1e-07', '1.23e+08']
    """
    if value != value or value in (math.inf, -math.inf):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e7:
        return f"{value:.3g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _label(value: float, marked: Sequence[float]) -> str:
    """With as many digits as tell it from its neighbours: 1,000.2 and 1,000.4."""
    apart = marked[1] - marked[0] if len(marked) > 1 else abs(value)
    if not 1e-3 <= apart <= max(map(abs, marked)) < 1e7:
        return number(value)
    return f"{value:,.{max(0, -math.floor(math.log10(apart) + 1e-9))}f}"


def _span(values: Sequence[float]) -> tuple[float, float]:
    """From the least to the greatest; equal ones get some room around them."""
    low, high = min(values), max(values)
    if low < high and (high / 2 - low / 2) > 1e-12 * max(abs(low), abs(high)):
        return low, high
    room = abs(low) * 0.5 or 1.0
    return max(low - room, -1.7e308), min(high + room, 1.7e308)


def _columns(points: list[Point]) -> Iterator[list[Point]]:
    count = min(COLUMNS, len(points))
    edges = [column * len(points) // count for column in range(count + 1)]
    yield from (points[a:b] for a, b in pairwise(edges))


def _extremes(points: list[Point]) -> Iterator[Point]:
    for column in _columns(points):
        ends = {min(column, key=lambda p: p[1]), max(column, key=lambda p: p[1])}
        yield from sorted(ends)


def _thinned(points: list[Point]) -> Iterator[Point]:
    """The last of each column: a running mean knows those before it."""
    yield from (column[-1] for column in _columns(points))
