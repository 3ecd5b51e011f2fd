"""Curves of several runs in one picture: one line per run, one colour per method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Line(NamedTuple):
    method: str
    x: Sequence[float]
    y: Sequence[float]


def draw_lines(lines: Sequence[Line], title: str, xlabel: str, ylabel: str, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    methods = list(dict.fromkeys(line.method for line in lines))
    for number, line in enumerate(lines):
        is_first = line.method not in [earlier.method for earlier in lines[:number]]
        axes.plot(
            line.x,
            line.y,
            color=f"C{methods.index(line.method)}",
            marker=".",
            linewidth=1.5,
            label=line.method if is_first else None,
        )
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
