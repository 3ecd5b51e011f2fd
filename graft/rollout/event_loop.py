"""Coroutines for plain code: run to their end, also inside an event loop that runs already.

    run(lambda: collect_all(...))     in a script: on this thread
                                      in a notebook, whose own loop is running: on another thread

Ctrl-C cancels the coroutine, waits until it has ended, and is raised then: contexts and environments
are closed, and whatever was used can be used again.

Environments that are not `blocking` run on the same loop. One that waits or computes for long delays all
attempts, and asyncio handles the first Ctrl-C or SIGTERM on that loop: never. A `StallMonitor` helps:

    5 s     an environment blocks the rollout event loop since 5 s, at my_env.py:12 in respond; ...
    SIGTERM after 2 s without an iteration of the loop it is sent again, which raises inside that code;
            2 s later the process exits; saved checkpoints are complete
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from graft.deadlines import is_user_file, short_file
from graft.garbage import rare_collections
from graft.rollout.user_calls import call, compute_reward, fork_env

T = TypeVar("T")

BEAT = 0.2
"""Seconds between two heartbeats of the loop, and between two checks of them."""
REPORT_AFTER = 5.0
GRACE = 2.0
"""Seconds that the loop has to handle a signal."""
CANCEL_SECONDS = 30.0
"""For cancelled work to end after Ctrl-C; a second Ctrl-C does not wait."""
INTERRUPTED = 130
CALLERS = {
    call.__code__: "an environment",
    fork_env.__code__: "the fork of an environment",
    compute_reward.__code__: "a reward",
}
"""Functions that call a user's code on the loop, and whose code it is."""


def warn(text: str) -> None:
    print(f"graft: {text}", file=sys.stderr, flush=True)


class StallMonitor:
    """Watches one event loop from a thread, while it is entered."""

    def __init__(self) -> None:
        self._thread_id = 0  # of the loop; 0: it does not run
        self._beat = time.monotonic()
        self._signalled: float | None = None  # when a signal came that is not handled yet
        self._resent = False
        self._report_at = REPORT_AFTER
        self._handler: Any = None
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="graft-stall", daemon=True)

    @property
    def seconds(self) -> float:
        """The seconds since the last iteration of the loop; 0.0: it does not run."""
        return time.monotonic() - self._beat if self._thread_id else 0.0

    def __enter__(self) -> StallMonitor:
        is_main = threading.current_thread() is threading.main_thread()
        self._handler = signal.getsignal(signal.SIGINT) if is_main else None
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread_id = 0
        self._done.set()
        if threading.current_thread() is threading.main_thread() and self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)

    async def run(self, work: Awaitable[T]) -> T:
        """Await `work` and watch the loop meanwhile."""
        loop = asyncio.get_running_loop()
        self.follow(loop)
        loop.set_exception_handler(self._on_lost_task)
        if threading.current_thread() is threading.main_thread():
            inner = signal.getsignal(signal.SIGINT)  # asyncio's, which cancels what runs
            if callable(inner):
                signal.signal(signal.SIGINT, lambda number, frame: self._note(inner, number, frame))
        return await work

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch a loop; called on its thread."""

        def beat() -> None:
            self._beat = time.monotonic()
            self._report_at = REPORT_AFTER
            if not self._done.is_set():
                loop.call_later(BEAT, beat)

        self._thread_id = threading.get_ident()
        beat()

    def _note(self, inner: Callable[..., Any], number: int, frame: FrameType | None) -> None:
        self._signalled = self._signalled or time.monotonic()
        inner(number, frame)

    def _on_lost_task(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """Report a task whose end nobody awaited, unless Ctrl-C is why.

        An interrupt that is raised inside blocking code leaves the other attempts pending. Their
        tracebacks, a page each, would hide the line that says what was saved.
        """
        error = context.get("exception")
        is_ours = error is None or isinstance(error, KeyboardInterrupt)
        if self._signalled is None or not is_ours:
            loop.default_exception_handler(dict(context))

    def _watch(self) -> None:
        while not self._done.wait(BEAT):
            still = self.seconds
            if still > self._report_at and (text := self._report(still)):
                warn(text)
                self._report_at = 2 * still
            if (
                self._signalled is not None
                and min(still, time.monotonic() - self._signalled) > GRACE
            ):
                self._insist()

    def _insist(self) -> None:
        """The loop has not handled a signal: raise in the code that blocks it, then end the process."""
        if self._resent:
            warn(
                "the blocking code does not end, so the process exits; the last checkpoint is intact"
            )
            os._exit(INTERRUPTED)
        self._resent = True
        self._signalled = time.monotonic()
        signal.pthread_kill(self._thread_id, signal.SIGINT)  # a sleep of that thread ends too

    def _report(self, seconds: float) -> str:
        """Which line blocks the loop; "": none of an environment, tool or reward."""
        frame = sys._current_frames().get(self._thread_id)
        place, ours = "", ""
        while frame is not None and frame.f_code not in CALLERS:
            file = frame.f_code.co_filename
            at = f"{short_file(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
            place = place or (at if is_user_file(file) else "")
            ours = ours or at
            frame = frame.f_back
        if frame is None:
            return ""
        return (
            f"{CALLERS[frame.f_code]} blocks the rollout event loop since {seconds:.0f} s, at "
            f"{place or ours}; all attempts wait. Set `blocking = True` on its class: it then runs on a "
            "thread, and rollout.deadline ends the attempt"
        )


def run(work: Callable[[], Awaitable[T]]) -> T:
    """The result of `await work()`."""
    if _is_loop_running():
        return _run_aside(work)
    with StallMonitor() as monitor, rare_collections():
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
            # in short waits: a signal that another thread got is raised between two of them
            while not wait([result], BEAT).done:
                pass
        return result.result()
    except KeyboardInterrupt:
        if not result.done():
            started.result()()
            thread.join(CANCEL_SECONDS)
        raise


@contextmanager
def _raising() -> Iterator[None]:
    """Ctrl-C raises here at once. The handler of asyncio only cancels in its own loop, which is blocked."""
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
