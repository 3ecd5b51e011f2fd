"""Checkpoints against sets, as Markdown and as JSON:

| checkpoint | set | tasks | avg@8 | pass@8 | maj@8 | calls |
|---|---|---|---|---|---|---|
| rl-000000 | gsm | 500 | 0.430 [0.401, 0.460] | 0.812 [0.776, 0.846] | 0.548 [0.504, 0.592] | 1.9 |
| rl-000020 | gsm | 500 | 0.551 [0.521, 0.580] | 0.840 [0.806, 0.872] | 0.640 [0.598, 0.682] | 2.0 |

Sets with several data sources are shown once more, source by source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graft.evaluate.estimates import Estimate
from graft.evaluate.results import EvalResult

HEAD, SOURCE, TASKS, CALLS = ("checkpoint", "set"), "data source", "tasks", "calls"
"""Titles of the columns; `graft explain` knows each of them, and those of `ScoreTable.measures`."""


@dataclass(frozen=True, slots=True)
class ScoreTable:
    """Rows in the order they are shown: checkpoint -> set -> cell, where one was computed."""

    sets: list[str]
    rows: Mapping[str, Mapping[str, EvalResult]]
    caption: str
    samples: int = 1
    k: Sequence[int] = (1,)
    solved: float = 1.0
    """The reward from which on an attempt counts as right for pass@k."""
    problems: list[str] = field(default_factory=list[str])
    """Why it is not complete."""

    @property
    def measures(self) -> list[str]:
        """What is worked out of each cell; one attempt says no more than its reward."""
        if self.samples == 1:
            return ["avg@1"]
        several = [k for k in self.k if k > 1]
        return [
            f"avg@{self.samples}",
            *(f"pass@{k}" for k in self.k),
            *(f"maj@{k}" for k in several),
        ]

    def markdown(self) -> str:
        cells = [
            (name, label, cells[label])
            for name, cells in self.rows.items()
            for label in self.sets
            if label in cells
        ]
        parts = [self._drawn([*HEAD], [([n, s], cell) for n, s, cell in cells])]
        by_source = [
            ([name, label, source or "-"], part)
            for name, label, cell in cells
            if len(set(cell.sources)) > 1
            for source, part in cell.by_source().items()
        ]
        if by_source:
            parts.append(self._drawn([*HEAD, SOURCE], by_source, False))
        parts.append(self.caption)
        parts += [f"Not complete: {problem}" for problem in self.problems]
        return "\n\n".join(parts) + "\n"

    def _drawn(
        self, head: list[str], rows: Sequence[tuple[list[str], EvalResult]], is_whole: bool = True
    ) -> str:
        """Calls, failures and what is missing are known of whole sets only."""
        lines = [[*head, TASKS, *self.measures, *([CALLS] if is_whole else [])]]
        lines.append(["---"] * len(lines[0]))
        for names, cell in rows:
            known = cell.estimates(self.measures, self.solved)
            shown = [show(known.get(measure)) for measure in self.measures]
            calls = [f"{cell.tool_calls:.1f}{_remarks(cell)}"] if is_whole else []
            lines.append([*names, str(len(cell.tasks)), *shown, *calls])
        return drawn(lines)

    def to_json(self, with_tasks: bool = True) -> dict[str, Any]:
        """`with_tasks`: the rewards and votes behind it, from which another call can compare."""
        rows = [
            {
                "checkpoint": name,
                "scores": {label: self._scores(cell, with_tasks) for label, cell in cells.items()},
            }
            for name, cells in self.rows.items()
        ]
        settings = {
            label: next(cells[label].settings for cells in self.rows.values() if label in cells)
            for label in self.sets
            if any(label in cells for cells in self.rows.values())
        }
        told = {"caption": self.caption, "solved": self.solved, "sets": settings, "rows": rows}
        return {**told, "problems": self.problems}

    def _scores(self, cell: EvalResult, with_tasks: bool) -> dict[str, Any]:
        scores = {
            "reward": cell.reward,
            "tasks": len(cell.tasks),
            "samples": self.samples,
            "measures": self._measured(cell),
            "sources": {source: self._measured(part) for source, part in cell.by_source().items()},
            **cell.summary(),
        }
        if with_tasks:
            each = zip(cell.tasks, cell.rewards, cell.votes, strict=True)
            scores["attempts"] = {
                task: {"rewards": rewards, "votes": votes} for task, rewards, votes in each
            }
        return scores

    def _measured(self, cell: EvalResult) -> dict[str, Any]:
        known = cell.estimates(self.measures, self.solved)
        return {name: {"value": v, "interval": interval} for name, (v, interval) in known.items()}


def drawn(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table; its second line is the ruler."""
    whole = [[entry.replace("|", "\\|") for entry in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in whole)


def show(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    if estimate.interval is None:
        return f"{estimate.value:.3f}"
    low, high = estimate.interval
    return f"{estimate.value:.3f} [{low:.3f}, {high:.3f}]"


def _remarks(cell: EvalResult) -> str:
    """What a reader must know before believing the numbers beside it."""
    said = []
    if cell.failed:
        said.append(f"{cell.failed:.0%} failed" if cell.failed >= 0.01 else "under 1% failed")
    if cell.overlong:
        said.append(f"{cell.overlong} prompts too long")
    if cell.missing:
        said.append(f"{cell.missing} attempts missing")
    return f" ({', '.join(said)})" if said else ""
