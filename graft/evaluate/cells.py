"""The cells of an evaluation: one checkpoint on one set, kept in a file that only grows.

    {"checkpoint": "rl-000020", "set": "earl:sort-4", "settings": {...}, "reward": 0.55, ...}

A cell is found again by its checkpoint (name and weights), its set, and everything else that its
score depends on. So an evaluation that was killed goes on where it stopped, and one with other
settings computes its own cells beside the old ones.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from graft.evaluate.run import Score

NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True)
class Cell:
    """How a checkpoint did on a set."""

    checkpoint: str
    set: str
    settings: dict[str, Any]
    weights: str
    """Tells apart two models that had the same name."""
    reward: float
    margin: float | None
    """Half of the 95% interval of `reward`; None of a single task."""
    tool_calls: float
    """Per attempt."""
    tool_rate: float
    """Share of the attempts with a call."""
    failed: float
    """Share of the attempts that broke, through no fault of the policy; they count as reward 0."""
    seconds: float
    rewards: list[list[float]]
    """Of every attempt, task by task."""

    @classmethod
    def of(cls, score: Score, seconds: float, **which: Any) -> Cell:
        """The cell of a score; `which` names checkpoint, set, settings and weights."""
        return cls(
            **which,
            reward=score.reward,
            margin=margin_95(score.rewards),
            tool_calls=score.tool_calls,
            tool_rate=score.tool_rate,
            failed=score.failed,
            seconds=round(seconds, 2),
            rewards=score.rewards,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> dict[str, Any]:
        """Its numbers without the single attempts."""
        names = ("reward", "margin", "tool_calls", "tool_rate", "failed", "seconds")
        return {name: getattr(self, name) for name in names}


def margin_95(rewards: Sequence[Sequence[float]]) -> float | None:
    """Half of the 95% interval of the mean. Attempts at one task are alike: the tasks are counted.

    >>> round(margin_95([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 0.0]]), 3)  # 0.5, 0, 1, 0.5
    0.4
    """
    means = [math.fsum(task) / len(task) for task in rewards if task]
    if len(means) < 2:
        return None
    centre = math.fsum(means) / len(means)
    variance = math.fsum((mean - centre) ** 2 for mean in means) / (len(means) - 1)
    return NORMAL_95 * math.sqrt(variance / len(means))


class Ledger:
    """A file with one cell per line. What is written there stays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cells: list[Cell] = []
        self.broken = 0
        """Lines that are no cells: a process was killed while it wrote."""
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        for line in filter(None, text.split("\n")):
            if (cell := _read(line)) is None:
                self.broken += 1
            else:
                self.cells.append(cell)

    def find(
        self, set: str, settings: Mapping[str, Any], checkpoint: str, weights: str
    ) -> Cell | None:
        """The cell of exactly this, if it was computed."""
        for cell in self.under(set, settings):
            if (cell.checkpoint, cell.weights) == (checkpoint, weights):
                return cell
        return None

    def under(self, set: str, settings: Mapping[str, Any]) -> list[Cell]:
        """All checkpoints on this set under these settings, the latest computed first."""
        return [cell for cell in self.cells[::-1] if (cell.set, cell.settings) == (set, settings)]

    def append(self, cell: Cell) -> None:
        """On the disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(cell.to_json(), allow_nan=False).encode() + b"\n"
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = b"\n" + line  # behind the half line of somebody who was killed
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.cells.append(cell)


def _read(line: str) -> Cell | None:
    try:
        values = json.loads(line)
        return Cell(**{field.name: values[field.name] for field in fields(Cell)})
    except (ValueError, KeyError, TypeError):
        return None
