"""Ctrl-C without damage: a rollout may be cut short at once, an update is always finished."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupt:
    """Turns SIGINT and SIGTERM into KeyboardInterrupt, held back while `held()` is active.

    A second signal while one is held back raises at once: the person means it, and the last
    checkpoint on disk is whole in any case.
    """

    def __init__(self) -> None:
        self._is_holding = False
        self._is_pending = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # others cannot set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_holding and not self._is_pending:
            self._is_pending = True
            return
        raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nothing interrupts the block; a signal that came meanwhile is raised after it."""
        self._is_holding, self._is_pending = True, False
        try:
            yield
        finally:
            self._is_holding = False
        if self._is_pending:
            raise KeyboardInterrupt
