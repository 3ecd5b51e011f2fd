"""Checkpoints against sets, as Markdown and as JSON:

| checkpoint | earl:order | earl:sort-4 |
|---|---|---|
| sft-000100 | 0.912 ± 0.025 (1.9 calls) | 0.430 ± 0.031 (5.2 calls) |
| rl-000020 | 0.950 ± 0.019 (2.0 calls) | 0.551 ± 0.030 (5.0 calls, 1% failed) |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graft.evaluate.cells import Cell


@dataclass(frozen=True, slots=True)
class Table:
    """Rows in the order they are shown: checkpoint -> set -> cell, where one was computed."""

    sets: list[str]
    rows: Mapping[str, Mapping[str, Cell]]
    caption: str

    def markdown(self) -> str:
        head = ["checkpoint", *self.sets]
        lines = [head, ["---"] * len(head)]
        for name, cells in self.rows.items():
            lines.append([name, *(_show(cells.get(label)) for label in self.sets)])
        drawn = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{drawn}\n\n{self.caption}\n"

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                "checkpoint": name,
                "scores": {label: cell.summary() for label, cell in cells.items()},
            }
            for name, cells in self.rows.items()
        ]
        settings = {
            label: next(cells[label].settings for cells in self.rows.values() if label in cells)
            for label in self.sets
            if any(label in cells for cells in self.rows.values())
        }
        return {"caption": self.caption, "sets": settings, "rows": rows}


def _show(cell: Cell | None) -> str:
    if cell is None:
        return ""
    margin = "" if cell.margin is None else f" ± {cell.margin:.3f}"
    failed = "" if not cell.failed else f", {cell.failed:.0%} failed"
    return f"{cell.reward:.3f}{margin} ({cell.tool_calls:.1f} calls{failed})"
