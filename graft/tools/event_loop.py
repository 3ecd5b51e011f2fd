"""One event loop in a background thread, for asynchronous code with synchronous callers.

The first call starts it; a child process of `os.fork` starts its own, since threads do not fork. All of its
work is the code of users, so what would end the loop fails the work that raised it instead.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from graft.user_tasks import Interruption, contained, containing_tasks

T = TypeVar("T")

_lock = threading.Lock()
_running: tuple[int, asyncio.AbstractEventLoop] | None = None  # process id, loop


def loop() -> asyncio.AbstractEventLoop:
    """The running loop of this process."""
    global _running
    with _lock:
        if _running is None or _running[0] != os.getpid():
            fresh = asyncio.new_event_loop()
            threading.Thread(target=fresh.run_forever, name="graft-tools", daemon=True).start()
            _running = os.getpid(), fresh
        return _running[1]


def start(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine; exit() in it, or in its tasks, is an Interruption."""

    async def held() -> T:
        with containing_tasks():
            return await contained(work)

    return asyncio.run_coroutine_threadsafe(held(), loop())


def run(work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
    """Wait for the result of a coroutine, on any thread but the loop's own.

    Past `timeout` seconds the coroutine is cancelled and TimeoutError is raised.
    """
    try:
        return start(asyncio.wait_for(contained(work), timeout)).result()
    except Interruption as interruption:  # raised here it ends no loop; callers know it by its kind
        raise interruption.error from None
