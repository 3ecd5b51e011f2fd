"""The display of a run whose screen belongs to another process."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from typing import Any

DisplayCall = tuple[str, tuple[Any, ...]]
"""A method of `Display` and its arguments."""


class DisplayRelay:
    """Records the calls of a display until the other process fetches and repeats them."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[DisplayCall] = queue.SimpleQueue()

    def note(self, text: str) -> None:
        self._calls.put(("note", (text,)))

    def phase(self, name: str, steps: int) -> None:
        self._calls.put(("phase", (name, steps)))

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        self._calls.put(("update", (step, dict(metrics))))

    def alarm(self, text: str, level: str = "alarm", step: int | None = None) -> None:
        self._calls.put(("alarm", (text, level, step)))

    def drain(self) -> list[DisplayCall]:
        """The calls since the last time."""
        return [self._calls.get() for _ in range(self._calls.qsize())]
