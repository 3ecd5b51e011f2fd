"""Blocking calls of users' code, each on a thread that the caller can abandon."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

MAX_IDLE = 64
"""Threads kept for the next call; starting one takes longer than most calls."""


class BlockingCall:
    """One call. It cannot be killed; `is_given_up` is set when its caller stops waiting."""

    def __init__(self, run: Callable[[], None], name: str) -> None:
        self.run, self.name, self.is_given_up = run, name, False


class ThreadRunner(threading.Thread):
    """Runs calls one after the other, and ends where MAX_IDLE threads are idle already."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.calls: SimpleQueue[BlockingCall] = SimpleQueue()
        self.call: BlockingCall | None = None

    @property
    def is_given_up(self) -> bool:
        """Whether the caller of the present call has stopped waiting."""
        return self.call is not None and self.call.is_given_up

    def run(self) -> None:
        while True:
            self.call = self.calls.get()
            self.name = self.call.name
            self.call.run()
            self.call, self.name = None, "graft-idle"
            if len(_idle) >= MAX_IDLE:
                return
            _idle.append(self)


_idle: deque[ThreadRunner] = deque()  # the last to become idle is used first
os.register_at_fork(after_in_child=_idle.clear)  # threads stay with the parent


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Await `function(*args)` on a daemon thread of its own.

    Not a pool: a call that never returns keeps its worker, 200 of them the whole pool, and closing the
    event loop or leaving the program would wait for it. Here the caller stops waiting at its deadline
    and sets is_given_up (`graft.tools.calling` reads that), and the thread ends with the
    process at the latest.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def deliver(result: Any, error: Exception | None) -> None:
        if future.done():  # the deadline has passed
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = function(*args)
        except BaseException as error:
            failure = _as_failure(error)
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(deliver, result, failure)

    call = BlockingCall(run, f"graft-{getattr(function, '__name__', 'call')}")
    try:
        runner = _idle.pop()
    except IndexError:
        runner = ThreadRunner()
        runner.start()
    runner.calls.put(call)
    try:
        return await future
    except asyncio.CancelledError:
        call.is_given_up = True
        raise


def _as_failure(error: BaseException) -> Exception:
    """An exception that a future can carry. SystemExit would end the program that awaits it, and a
    future refuses StopIteration, so that its caller would wait forever."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    failure = RuntimeError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
