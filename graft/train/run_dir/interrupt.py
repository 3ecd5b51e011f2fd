"""Safe Ctrl-C: a rollout stops at once, an update is always finished."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupt:
    """Defers SIGINT while weights change; SIGTERM counts as SIGINT.

    Outside `held()` Python's handler is in place, which asyncio turns into an orderly cancellation of
    sampling. A second signal while one is deferred raises at once; the last checkpoint on disk is whole in
    any case.
    """

    def __init__(self, *, waits: bool = False) -> None:
        """`waits`: signals only set `is_pending`, which the caller polls. The processes of a group must
        stop together."""
        self.waits = waits
        self.is_pending = False
        """Whether a stop was requested."""
        self._previous: Any = None
        self._own: Any = None

    def ask(self) -> None:
        """Request a stop, as a signal does."""
        self.is_pending = True

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
        # a script that starts a process in the background has it ignore SIGINT
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    def _wait(self, number: int, frame: FrameType | None) -> None:
        if self.is_pending:
            raise KeyboardInterrupt
        self.is_pending = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Defer signals during the block; one that came is raised after it."""
        if not self._is_ours or self.waits:
            yield
            return
        self.is_pending = False
        previous = signal.signal(signal.SIGINT, self._wait)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)
        if self.is_pending:
            raise KeyboardInterrupt
