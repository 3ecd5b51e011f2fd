"""From the metrics of runs to accuracy against sampled tokens: a table and a picture."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from benchmarks.picture import Line, draw_lines


class Point(NamedTuple):
    tokens: int
    """Sampled since RL began, twins included."""
    sampled: float
    greedy: float
    tool_rate: float


class Curve(NamedTuple):
    method: str
    seed: int
    points: list[Point]

    def at(self, tokens: int) -> Point:
        """The last evaluation within that many sampled tokens."""
        return max((p for p in self.points if p.tokens <= tokens), key=lambda p: p.tokens)


def read_curve(folder: Path, method: str, seed: int) -> Curve:
    """The held-out scores that a run wrote down, before its first step and on the way.

    Of a run that was cut short, those it came to; of one that never began, none.
    """
    log, end = folder / "metrics.jsonl", folder / "summary.json"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    rows = [row for row in map(json.loads, lines) if row.get("phase") == "rl"]
    summary = json.loads(end.read_text(encoding="utf-8")) if end.exists() else {}

    def point(tokens: float, scores: dict[str, float], prefix: str = "") -> Point:
        names = ("sampled", "greedy", "tool_rate")
        return Point(round(tokens), *(scores[prefix + name] for name in names))

    points = [point(0, summary["before"])] if summary else []
    tokens = 0.0
    for row in rows:
        tokens += row["num_tokens"]
        if "eval/sampled" in row:
            points.append(point(tokens, row, "eval/"))
    if summary and points[-1].tokens != round(tokens):
        points.append(point(tokens, summary["after"]))
    return Curve(method, seed, points)


def table(curves: list[Curve], budget: int = 0) -> str:
    """Markdown: mean and spread over seeds at the same number of sampled tokens."""
    budget = budget or min(curve.points[-1].tokens for curve in curves)
    lines = [
        f"| method | seeds | before | sampled, after {budget:,} tokens | greedy | attempts with a call |",
        "|---|---|---|---|---|---|",
    ]
    for method in dict.fromkeys(curve.method for curve in curves):
        mine = [curve for curve in curves if curve.method == method]
        ends = [curve.at(budget) for curve in mine]
        cells = [
            method,
            str(len(mine)),
            _spread([curve.points[0].sampled for curve in mine]),
            _spread([end.sampled for end in ends]),
            _spread([end.greedy for end in ends]),
            _spread([end.tool_rate for end in ends]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    spread = f" +- {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"


def draw(curves: list[Curve], title: str, file: Path) -> None:
    lines = [
        Line(c.method, [p.tokens for p in c.points], [p.sampled for p in c.points]) for c in curves
    ]
    draw_lines(lines, title, "sampled tokens", "held-out reward, sampled", file)
