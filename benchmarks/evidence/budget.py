"""Stops a run in time: a tracker that counts sampled tokens and looks at the clock.

It raises a kind of Ctrl-C, so the run saves a checkpoint, from which the same command continues.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class BudgetSpent(KeyboardInterrupt):
    """The run has sampled its tokens."""


class TimeIsUp(KeyboardInterrupt):
    """The caller's minutes are over."""


class Budget:
    """A tracker; its limits are those of `limited`."""

    tokens = 0
    """0: no limit."""
    deadline = float("inf")
    """Of time.monotonic()."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder

    def log(self, step: int, metrics: Mapping[str, float], phase: str) -> None:
        if phase == "rl" and self.tokens and count_tokens(read_steps(self.folder)) >= self.tokens:
            raise BudgetSpent
        if time.monotonic() > self.deadline:
            raise TimeIsUp

    def truncate_after(self, phase: str, step: int) -> None: ...

    def close(self) -> None: ...


@contextmanager
def limited(tokens: int, deadline: float) -> Iterator[None]:
    """Apply these limits to runs in this process."""
    Budget.tokens, Budget.deadline = tokens, deadline
    try:
        yield
    finally:
        Budget.tokens, Budget.deadline = 0, float("inf")


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each RL step of a run."""
    file = folder / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [row for row in map(json.loads, lines) if row["phase"] == "rl"]


def count_tokens(steps: list[dict[str, Any]]) -> int:
    """Tokens that the policy sampled."""
    return int(sum(step["num_trained_tokens"] for step in steps))
