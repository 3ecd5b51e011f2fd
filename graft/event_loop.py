"""Event loops in background threads, for asynchronous code with synchronous callers."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """One loop, started by its first use; a child of `os.fork` starts its own, since threads do not fork."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._running: tuple[int, asyncio.AbstractEventLoop] | None = None  # process id, loop

    def loop(self) -> asyncio.AbstractEventLoop:
        """The running loop of this process."""
        with self._lock:
            if self._running is None or self._running[0] != os.getpid():
                fresh = asyncio.new_event_loop()
                threading.Thread(target=fresh.run_forever, name=self.name, daemon=True).start()
                self._running = os.getpid(), fresh
            return self._running[1]

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Wait for the result of a coroutine, on any thread but the loop's own.

        Past `timeout` seconds, and when the wait is interrupted, the coroutine is cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, timeout), self.loop())
        try:
            return future.result()
        finally:
            future.cancel()


TOOL_LOOP = BackgroundLoop("graft-tools")
"""For the tools and environments of the process."""
