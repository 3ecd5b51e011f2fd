"""Ctrl-C without damage: a rollout may be cut short at once, an update is always finished."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupt:
    """Holds SIGINT back while weights change; SIGTERM counts as SIGINT.

    Outside `held()` Python's own handler is in place, which asyncio turns into an orderly
    cancellation of whatever is being sampled. A second signal while one is held back raises at once:
    the person means it, and the last checkpoint on disk is whole in any case.
    """

    def __init__(self, *, waits: bool = False) -> None:
        """`waits`: nothing is ever cut short, somebody looks at `is_pending` when it suits. Processes
        that work together must stop together."""
        self.waits = waits
        self._previous: Any = None
        self._own: Any = None
        self._is_pending = False

    @property
    def is_pending(self) -> bool:
        """Whether somebody wants to stop."""
        return self._is_pending

    def ask(self) -> None:
        """As a signal does, from within."""
        self._is_pending = True

    @property
    def _is_ours(self) -> bool:  # only the main thread may set handlers
        return threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Interrupt:
        if self._is_ours:
            self._previous = signal.signal(signal.SIGTERM, self._end)
            if self.waits:
                self._own = signal.signal(signal.SIGINT, self._wait)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGTERM, self._previous)
            if self.waits:
                signal.signal(signal.SIGINT, self._own)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started with & by a script
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    def _wait(self, number: int, frame: FrameType | None) -> None:
        if self._is_pending:
            raise KeyboardInterrupt
        self._is_pending = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nothing interrupts the block; a signal that came meanwhile is raised after it."""
        if not self._is_ours or self.waits:
            yield
            return
        self._is_pending = False
        previous = signal.signal(signal.SIGINT, self._wait)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)
        if self._is_pending:
            raise KeyboardInterrupt
