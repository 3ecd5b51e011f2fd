"""Rows with goals, kept as JSON after every one of them, shown as a Markdown table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FAILED = "failed"


@dataclass(slots=True)
class Row:
    """One number, what it should be, and how it came about."""

    name: str
    unit: str
    value: float | None
    """The median of the rounds; None if the measurement failed."""
    must: float | None = None
    aim: float | None = None
    is_less_better: bool = False
    rounds: list[float] = field(default_factory=list[float])
    note: str = ""
    """Percentages of bounds, ranges: for people."""

    @property
    def verdict(self) -> str:
        if self.value is None:
            return FAILED
        for name, goal in (("aim", self.aim), ("must", self.must)):
            if goal is not None and self._reaches(goal):
                return name
        return "" if self.must is None else "short"

    def _reaches(self, goal: float) -> bool:
        assert self.value is not None
        return self.value <= goal if self.is_less_better else self.value >= goal

    def line(self) -> str:
        """A row of the Markdown table."""
        cells = [self.name, self.unit, *map(_number, (self.must, self.aim, self.value))]
        shown = " ".join(_number(value) for value in self.rounds)
        return f"| {' | '.join([*cells, self.verdict, shown, self.note])} |"


HEAD = """\
| what | unit | must | aim | measured | verdict | rounds | note |
|---|---|---|---|---|---|---|---|"""


class Report:
    """The rows so far; `save` writes `gpu.json` and `gpu.md` into the folder."""

    def __init__(self, folder: Path, machine: dict[str, Any], started: float) -> None:
        self.folder, self.machine, self.started = folder, machine, started
        self.roofs: dict[str, float] = {}
        self.jobs: dict[str, dict[str, Any]] = {}  # name -> seconds, error
        self.rows: list[Row] = []

    @classmethod
    def load(cls, file: Path) -> Report:
        data = json.loads(file.read_text())
        report = cls(file.parent, data["machine"], data["started"])
        report.roofs, report.jobs = data["roofs"], data["jobs"]
        names = set(Row.__dataclass_fields__)
        report.rows = [
            Row(**{name: value for name, value in row.items() if name in names})
            for row in data["rows"]
        ]
        return report

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        data = {
            "machine": self.machine,
            "started": self.started,
            "roofs": self.roofs,
            "jobs": self.jobs,
            "rows": [{**asdict(row), "verdict": row.verdict} for row in self.rows],
        }
        (self.folder / "gpu.json").write_text(json.dumps(data, indent=1) + "\n")
        (self.folder / "gpu.md").write_text(self.markdown() + "\n")

    def markdown(self) -> str:
        about = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        seconds = [f"{name} {job['seconds']:.0f}" for name, job in self.jobs.items()]
        lines = [about, "", HEAD, *(row.line() for row in self.rows), ""]
        return "\n".join([*lines, f"Seconds: {', '.join(seconds)}."])

    def against(self, previous: Report) -> str:
        """Every row that both have: then, now, and now divided by then."""
        before = {row.name: row for row in previous.rows}
        lines = ["| what | unit | before | now | ratio |", "|---|---|---|---|---|"]
        for row in self.rows:
            old = before.get(row.name)
            if old is None or not old.value or row.value is None:
                continue
            then, now = _number(old.value), _number(row.value)
            lines.append(
                f"| {row.name} | {row.unit} | {then} | {now} | {row.value / old.value:.3f} |"
            )
        return "\n".join(lines)


def _number(value: float | None) -> str:
    """Three digits that matter: 61234 -> 61,200; 2.4987 -> 2.5; 0.00123 -> 0.00123."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}"
