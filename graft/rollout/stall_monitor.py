"""Code of an environment that does not give the event loop back: reported, and a signal still ends it.

Environments that are not `blocking` run on the event loop of the rollouts. One that waits or computes for
long holds up all attempts, and asyncio answers the first Ctrl-C or SIGTERM on that same loop: never.

    5 s     an environment blocks the rollout event loop since 5 s, at my_env.py:12 in respond; ...
    SIGTERM after 2 s without a turn of the loop it is sent again, which raises inside that code;
            2 s later the process ends as it is: what was saved is whole
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any, TypeVar

from graft.deadlines import is_users, short_file

T = TypeVar("T")

BEAT = 0.2
"""Seconds between two signs of life of the loop."""
REPORT_AFTER = 5.0
GRACE = 2.0
"""Seconds that the loop has to answer a signal."""
INTERRUPTED = 130


def to_stderr(text: str) -> None:
    print(f"graft: {text}", file=sys.stderr, flush=True)


class StallMonitor:
    """Watches one event loop from a thread, while it is entered."""

    def __init__(self, say: Callable[[str], None] = to_stderr) -> None:
        self.say = say
        self._thread_id = 0  # of the loop; 0: it does not run
        self._beat = time.monotonic()
        self._asked: float | None = None  # when a signal came that nothing has answered
        self._resent = False
        self._report_at = REPORT_AFTER
        self._handler: Any = None
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="graft-stall", daemon=True)

    @property
    def seconds(self) -> float:
        """Since the loop has turned; 0.0: it does not run."""
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
        """Await `work`; the loop shows signs of life meanwhile."""
        self.follow(asyncio.get_running_loop())
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
        self._asked = self._asked or time.monotonic()
        inner(number, frame)

    def _watch(self) -> None:
        while not self._done.wait(BEAT):
            still = self.seconds
            if still > self._report_at and (text := self._report(still)):
                self.say(text)
                self._report_at = 2 * still
            if self._asked is not None and min(still, time.monotonic() - self._asked) > GRACE:
                self._insist()

    def _insist(self) -> None:
        """A signal that the loop has not answered: raise in its code, then end the process."""
        if self._resent:
            self.say("it does not end; the process does. The last checkpoint is whole")
            os._exit(INTERRUPTED)
        self._resent = True
        self._asked = time.monotonic()
        signal.pthread_kill(self._thread_id, signal.SIGINT)  # a sleep of that thread ends too

    def _report(self, seconds: float) -> str:
        """Which line holds the loop up; "": none of an environment, tool or reward."""
        from graft.rollout import live_trajectory as path

        callers = {
            path.call.__code__: "an environment",
            path.fork_env.__code__: "the fork of an environment",
            path.LiveTrajectory._judge.__code__: "a reward",  # pyright: ignore[reportPrivateUsage]
        }
        frame = sys._current_frames().get(self._thread_id)
        place, ours = "", ""
        while frame is not None and frame.f_code not in callers:
            file = frame.f_code.co_filename
            at = f"{short_file(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
            place = place or (at if is_users(file) else "")
            ours = ours or at
            frame = frame.f_back
        if frame is None:
            return ""
        return (
            f"{callers[frame.f_code]} blocks the rollout event loop since {seconds:.0f} s, at "
            f"{place or ours}; all attempts wait. Set `blocking = True` on its class: it then runs on a "
            "thread, and rollout.deadline ends the attempt"
        )
