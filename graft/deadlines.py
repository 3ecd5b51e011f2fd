"""What this process waits for and since when, so that no wait is silent.

    with waiting("the gradients of step 12", deadline=600):
        ...

While the block runs, `current()` lists the wait. A `Watchdog` prints it:

    rank 1 waits for the gradients of step 12 since 0:30, in graft/train/learner.py:120

and again after 1, 2, 4 minutes. The waiting code enforces the deadline; this module only reports it.
Each thread has its own waits; of nested waits the inner one is reported.
"""

from __future__ import annotations

import site
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from graft.ours import FOLDERS, ROOT

T = TypeVar("T")

GRACE = 1.0
"""Seconds after a deadline before it is reported: the waiting code enforces it first."""


@dataclass(slots=True, eq=False)
class Wait:
    """One wait. `what` continues the phrase "rank 1 waits for"."""

    what: str
    since: float
    """time.monotonic() at its start."""
    deadline: float | None
    """Seconds that it may last; None: no limit is known."""
    thread: int
    """The thread's ident."""
    outer: Wait | None

    @property
    def age(self) -> float:
        return time.monotonic() - self.since

    @property
    def is_late(self) -> bool:
        return self.deadline is not None and self.age > self.deadline + GRACE


_innermost: dict[int, Wait] = {}
"""By thread."""
_skipped_files = {__file__}


def skip_frames_in(file: str) -> None:
    """Report the callers of this file's functions instead of the functions."""
    _skipped_files.add(file)


@contextmanager
def waiting(what: str, deadline: float | None = None) -> Iterator[Wait]:
    """`with waiting("an answer of the judge", deadline=60): ...`; not for tasks that share a thread."""
    thread = threading.get_ident()
    outer = _innermost.get(thread)
    _innermost[thread] = wait = Wait(what, time.monotonic(), deadline, thread, outer)
    try:
        yield wait
    finally:
        if outer is None:
            del _innermost[thread]
        else:
            _innermost[thread] = outer


def current() -> list[Wait]:
    """The innermost wait of each thread, the longest first."""
    return sorted(_innermost.values(), key=lambda wait: wait.since)


def overdue(after: float) -> list[Wait]:
    """The innermost wait of each thread that is longer than `after` seconds or than its own deadline.

    An outer wait that is overdue is reported even if it consists of many short ones, as in polling.
    """
    found: list[Wait] = []
    for innermost in current():
        wait: Wait | None = innermost
        while wait is not None and wait.age <= after and not wait.is_late:
            wait = wait.outer
        if wait is not None:
            found.append(wait)
    return found


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of `call`, or TimeoutError; its daemon thread then continues."""
    result: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="graft-within", daemon=True).start()
    if not futures.wait([result], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return result.result()


def clock(seconds: float) -> str:
    """0:31, 12:05, 1:02:03."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def where(thread: int) -> str:
    """File and line of the deepest function, graft's or the user's, that a thread is in."""
    frame = sys._current_frames().get(thread)
    while frame is not None and not _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{short_file(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "a library"


def _is_ours(file: str) -> bool:
    return file not in _skipped_files and _is_no_library(file)


@cache
def _is_no_library(file: str) -> bool:
    if file.startswith("<frozen"):
        return False
    return file.startswith(FOLDERS) or not file.startswith(_LIBRARIES)


_LIBRARIES = tuple(
    str(folder) + "/"
    for folder in {
        *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
)


def is_user_file(file: str) -> bool:
    """Whether a file is the user's: neither a library's nor graft's."""
    return not file.startswith((*FOLDERS, "<")) and _is_no_library(file)


def short_file(file: str) -> str:
    """A file's name for messages: relative to the working folder, or with the folder it is in."""
    path = Path(file)
    for base in (ROOT, Path.cwd()):
        if path.is_relative_to(base):
            return path.relative_to(base).as_posix()
    return Path(*path.parts[-2:]).as_posix()


class Watchdog:
    """Reports long waits: after 30 s at 0:30, 1:00, 2:00, 4:00, ... and once when a deadline passes.

    `peers` returns what the other processes do, such as {"rank 1": "is sampling, since 0:42"};
    `is_reported_elsewhere` is True for a wait that another process reports already.
    """

    def __init__(
        self,
        note: Callable[[str], None],
        *,
        after: float = 30.0,
        name: str = "",
        peers: Callable[[], Mapping[str, str]] = dict,
        is_reported_elsewhere: Callable[[Wait], bool] = lambda wait: False,
    ) -> None:
        self.note, self.after, self.name = note, after, name
        self.peers, self.is_reported_elsewhere = peers, is_reported_elsewhere
        self._reported: dict[Wait, tuple[float, bool]] = {}
        """The age at which a wait is reported next, and whether its deadline was reported."""
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        # often enough that a report is at most a tenth too late
        while not self._is_done.wait(min(1.0, self.after / 10)):
            self.check()

    def check(self) -> None:
        """Report what is due now."""
        waits = overdue(self.after)
        self._reported = {w: self._reported[w] for w in waits if w in self._reported}
        due = [w for w in waits if self._is_due(w) and not self.is_reported_elsewhere(w)]
        if not due:
            return
        for wait in due:
            self._reported[wait] = self._next(wait.age), wait.is_late
        lines = [self._line(wait) for wait in due]
        lines += [f"{peer} {status}" for peer, status in self.peers().items()]
        with suppress(OSError, ValueError):  # a closed output must not end the run
            self.note("\n".join(lines))

    def _is_due(self, wait: Wait) -> bool:
        next_age, was_late = self._reported.get(wait, (self.after, False))
        return wait.age > next_age or (wait.is_late and not was_late)

    def _next(self, age: float) -> float:
        """The age of the next report."""
        due = self.after
        while due <= age:
            due *= 2
        return due

    def _line(self, wait: Wait) -> str:
        begin = f"{self.name} waits" if self.name else "waiting"
        late = f", past its deadline of {clock(wait.deadline or 0)}" if wait.is_late else ""
        return f"{begin} for {wait.what} since {clock(wait.age)}{late}, in {where(wait.thread)}"
