"""From the metrics of runs to accuracy against tool calls: a table and a picture."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from benchmarks.picture import Line, draw_lines


class Point(NamedTuple):
    calls: float
    """Tool calls made since RL began; one that several attempts go through was made once."""
    score: float


class Outcome(NamedTuple):
    """One run."""

    method: str
    seed: int
    points: list[Point]
    greedy: float
    totals: dict[str, float]
    """Over all its steps."""
    steps: int


TOTALS = {
    "tools/calls_made": "tool calls",
    "num_tokens": "generated tokens",
    "num_trained_tokens": "trained tokens",
    "num_forward_tokens": "tokens in the learner",
    "time/rollout": "rollout, s",
    "time/learn": "learning, s",
}


def read_outcome(folder: Path, method: str, seed: int) -> Outcome | None:
    """None of a run that has not come to its end."""
    end = folder / "summary.json"
    if not end.exists():
        return None
    summary = json.loads(end.read_text(encoding="utf-8"))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row.get("phase") == "rl"]
    calls = 0.0
    before, after = summary.get("before") or {}, summary.get("after") or {}
    points = [Point(0.0, before["sampled"])] if before else []
    for row in rows:
        calls += row["tools/calls_made"]
        if "eval/sampled" in row:
            points.append(Point(calls, row["eval/sampled"]))
    if after and (not points or points[-1].calls != calls):
        points.append(Point(calls, after["sampled"]))
    totals = {name: sum(row[name] for row in rows) for name in TOTALS}
    return Outcome(method, seed, points, after.get("greedy", 0.0), totals, len(rows))


def table(outcomes: list[Outcome]) -> str:
    """Markdown: means over seeds, the spread of scores, and totals per step."""
    titles = ["method", "seeds", "before", "after", "greedy", *TOTALS.values()]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for method in dict.fromkeys(outcome.method for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.method == method]
        cells = [
            method,
            str(len(mine)),
            _spread([o.points[0].score for o in mine if o.points]),
            _spread([o.points[-1].score for o in mine if o.points]),
            _spread([o.greedy for o in mine if o.points]),
        ]
        for name in TOTALS:
            per_step = mean(o.totals[name] / max(o.steps, 1) for o in mine)
            cells.append(f"{per_step:,.0f}" if per_step >= 100 else f"{per_step:.3g}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    if not values:
        return ""
    spread = f" +- {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"


def draw(outcomes: list[Outcome], title: str, file: Path) -> None:
    lines = [
        Line(o.method, [p.calls for p in o.points], [p.score for p in o.points]) for o in outcomes
    ]
    draw_lines(lines, title, "tool calls made", "held-out reward, sampled", file)
