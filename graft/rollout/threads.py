"""Blocking calls of other people's code, each on a thread that can be given up."""

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
"""Threads that wait for the next call; to start one takes longer than most calls."""


class BlockingCall:
    """One call. It cannot be killed, but it can know that nobody waits any more."""

    def __init__(self, run: Callable[[], None], name: str) -> None:
        self.run, self.name, self.is_given_up = run, name, False


class ThreadRunner(threading.Thread):
    """Runs errands one after the other, and ends when there are enough of its kind without it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.errands: SimpleQueue[BlockingCall] = SimpleQueue()
        self.errand: BlockingCall | None = None

    @property
    def is_given_up(self) -> bool:
        """Whether nobody waits for what it does now."""
        return self.errand is not None and self.errand.is_given_up

    def run(self) -> None:
        while True:
            self.errand = self.errands.get()
            self.name = self.errand.name
            self.errand.run()
            self.errand, self.name = None, "graft-idle"
            if len(_idle) >= MAX_IDLE:
                return
            _idle.append(self)


_idle: deque[ThreadRunner] = deque()  # the one that stopped last is the first to go on
os.register_at_fork(after_in_child=_idle.clear)  # threads stay with the parent


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Await `function(*args)` on a daemon thread that nobody else uses meanwhile.

    A pool would not do: a call that never returns keeps its worker, 200 of them the whole pool, and
    closing the event loop or leaving the program would wait for it. Here the waiting side gives up
    at its deadline and says so on the errand (`graft.tools.calling` looks there), and the thread
    ends with the process at the latest.
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
        with suppress(RuntimeError):  # the event loop is gone: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, failure)

    errand = BlockingCall(run, f"graft-{getattr(function, '__name__', 'call')}")
    try:
        runner = _idle.pop()
    except IndexError:
        runner = ThreadRunner()
        runner.start()
    runner.errands.put(errand)
    try:
        return await future
    except asyncio.CancelledError:
        errand.is_given_up = True
        raise


def _as_failure(error: BaseException) -> Exception:
    """What a future can carry. SystemExit and its like would end the program that awaits it, and a
    future refuses StopIteration, so that the waiting side would never hear of it."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    failure = RuntimeError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
