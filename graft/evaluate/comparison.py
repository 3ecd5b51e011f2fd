"""This evaluation compared with an earlier one, task by task: `graft eval ... --against OTHER`.

| set | measure | tasks | rl-000020 | base | difference | p |
|---|---|---|---|---|---|---|
| gsm | avg | 500 | 0.551 | 0.430 | +0.121 [+0.094, +0.149] | 0.0001 |

Only tasks of both evaluations are compared, each with itself, so the difficulty of a task cancels. The
interval is a bootstrap of the tasks' differences, p a test that swaps the two sides task by task.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from graft.config import ConfigError
from graft.evaluate.estimates import Difference, compare
from graft.evaluate.results import SUMMARY, EvalResult
from graft.evaluate.table import ScoreTable, drawn

COLUMNS = ("set", "measure", "tasks", "ours", "theirs", "difference", "p")


@dataclass(frozen=True, slots=True)
class EarlierEvaluation:
    """An evaluation read from its file: rows and their results."""

    path: Path
    rows: dict[str, dict[str, EvalResult]]

    def beside(self, checkpoint: str, label: str) -> EvalResult | None:
        """The checkpoint of the same name if it was evaluated on this set, else the last one."""
        results = {name: row[label] for name, row in self.rows.items() if label in row}
        if not results:
            return None
        return results.get(checkpoint) or list(results.values())[-1]


def read_earlier(where: str) -> EarlierEvaluation:
    """A table's JSON file, or a folder that has one: an evaluations folder, or a run's."""
    path = Path(where)
    if path.is_dir():
        inside = (path / "table.json", path / "evaluations" / "table.json")
        found = next((file for file in inside if file.is_file()), None)
        if found is None:
            raise ConfigError(
                f"--against '{where}' has no table.json, nor evaluations/table.json; name the JSON "
                "file of an earlier `graft eval`"
            )
        path = found
    if not path.is_file():
        raise ConfigError(f"--against '{where}': there is no such file or folder")
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return EarlierEvaluation(
            path, {row["checkpoint"]: _results(row, table) for row in table["rows"]}
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--against '{path}' is not the JSON file of a `graft eval` ({type(error).__name__}: "
            f"{error}); evaluate again"
        ) from error


STORED = {field.name for field in fields(EvalResult)} & set(SUMMARY) - {"missing"}
"""Fields of a result that a table's JSON has."""


def _results(row: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, EvalResult]:
    results: dict[str, EvalResult] = {}
    for label, scores in row["scores"].items():
        attempts = scores["attempts"]
        results[label] = EvalResult(
            checkpoint=str(row["checkpoint"]),
            set=label,
            settings=dict(table["sets"][label]),
            weights="",
            tasks=list(attempts),
            sources=[""] * len(attempts),
            rewards=[[float(reward) for reward in one["rewards"]] for one in attempts.values()],
            votes=[[int(vote) for vote in one["votes"]] for one in attempts.values()],
            **{name: scores[name] for name in STORED},
        )
    return results


@dataclass(frozen=True, slots=True)
class TaskComparison:
    """One measure of one set in both evaluations."""

    set: str
    measure: str
    ours: str
    theirs: str
    difference: Difference

    def to_json(self) -> dict[str, Any]:
        names = {name: getattr(self, name) for name in ("set", "measure", "ours", "theirs")}
        return names | {"scores": self.difference._asdict()}


@dataclass(frozen=True, slots=True)
class Comparison:
    """All comparisons, and notes about what could not be compared."""

    path: Path
    rows: list[TaskComparison]
    notes: list[str]

    def markdown(self) -> str:
        lines = [[*COLUMNS], ["---"] * len(COLUMNS)]
        for row in self.rows:
            found = row.difference
            span = "" if found.interval is None else " [{:+.3f}, {:+.3f}]".format(*found.interval)
            lines.append(
                [
                    row.set,
                    row.measure,
                    str(found.tasks),
                    f"{row.ours} {found.ours:.3f}",
                    f"{row.theirs} {found.theirs:.3f}",
                    f"{found.value:+.3f}{span}",
                    f"{found.p:.4f}",
                ]
            )
        text = f"Against {self.path}, over the tasks that both have; 95% intervals, two-sided p."
        return "\n\n".join([*([drawn(lines)] if self.rows else []), text, *self.notes]) + "\n"

    def to_json(self) -> dict[str, Any]:
        rows = [row.to_json() for row in self.rows]
        return {"against": str(self.path), "rows": rows, "notes": self.notes}


def set_beside(table: ScoreTable, earlier: EarlierEvaluation) -> Comparison:
    """Every result of the table against the earlier one; measures that both have."""
    rows: list[TaskComparison] = []
    notes: list[str] = []
    for name, results in table.rows.items():
        for label, ours in results.items():
            theirs = earlier.beside(name, label)
            if theirs is None:
                notes.append(f"{label}: the earlier evaluation has no such set.")
                continue
            if not set(theirs.tasks) & set(ours.tasks):
                notes.append(f"{label}: no task is in both evaluations.")
                continue
            if text := _unlike(ours, theirs):
                notes.append(f"{label}: {text}")
            rows += _measures(table, label, ours, theirs)
    return Comparison(earlier.path, rows, list(dict.fromkeys(notes)))


def _measures(
    table: ScoreTable, label: str, ours: EvalResult, theirs: EvalResult
) -> list[TaskComparison]:
    names = ["avg", *(name for name in table.measures if not name.startswith("avg"))]
    rows: list[TaskComparison] = []
    for name in names:
        mine, other = ours.by_task(name, table.solved), theirs.by_task(name, table.solved)
        both = [task for task in mine if task in other]
        if both:
            found = compare([mine[task] for task in both], [other[task] for task in both])
            rows.append(TaskComparison(label, name, ours.checkpoint, theirs.checkpoint, found))
    return rows


def _unlike(ours: EvalResult, theirs: EvalResult) -> str:
    """Settings that change a task or its grade while its name stays."""
    keys = ("env", "args", "data", "reward", "wrappers", "has_tools")
    pairs = [(key, theirs.settings.get(key), ours.settings.get(key)) for key in keys]
    unlike = [f"{key} {then!r} then, {now!r} now" for key, then, now in pairs if then != now]
    return f"not the same settings: {'; '.join(unlike)}." if unlike else ""
