"""Coroutines for plain code: run to their end, also inside an event loop that runs already.

    run(lambda: collect_all(...))     in a script: on this thread
                                      in a notebook, whose own loop is running: on another thread

Ctrl-C cancels the coroutine, waits until it has ended, and is raised then: contexts are closed, and
environments too, so that whatever was used can be used again.
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TypeVar

from graft.rollout.stall_monitor import StallMonitor

T = TypeVar("T")

GRACE = 30.0
"""Seconds that cancelled work may take to end after Ctrl-C; a second Ctrl-C does not wait."""
BEAT = 0.2
"""Seconds between two looks at whether the work has ended."""


def run(work: Callable[[], Awaitable[T]]) -> T:
    """The result of `await work()`."""
    if _is_loop_running():
        return _run_aside(work)
    with StallMonitor() as monitor:
        return asyncio.run(monitor.run(work()))


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run_aside(work: Callable[[], Awaitable[T]]) -> T:
    """The same on a thread of its own; this one waits, and passes Ctrl-C on."""
    result: Future[T] = Future()
    started: Future[Callable[[], object]] = Future()

    async def main() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        started.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        with StallMonitor() as monitor:
            return await monitor.run(work())

    def body() -> None:
        try:
            result.set_result(asyncio.run(main()))
        except BaseException as error:
            result.set_exception(error)

    context = contextvars.copy_context()  # prints of environments belong to the notebook's cell
    thread = threading.Thread(target=context.run, args=(body,), name="graft-loop", daemon=True)
    thread.start()
    try:
        with _raising():
            while not wait(
                [result], BEAT
            ).done:  # a signal that another thread got is raised here then
                pass
        return result.result()
    except KeyboardInterrupt:
        if not result.done():
            started.result()()
            thread.join(GRACE)
        raise


@contextmanager
def _raising() -> Iterator[None]:
    """Ctrl-C raises here at once. asyncio's own handler only asks the loop that is blocked meanwhile."""
    handler = signal.getsignal(signal.SIGINT)
    is_asyncios = getattr(getattr(handler, "func", None), "__name__", "") == "_on_sigint"
    if not is_asyncios or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
