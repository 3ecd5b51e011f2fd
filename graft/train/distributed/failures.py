"""How a run of several processes ends when one of them fails.

The rank that has an error prints it, posts it in the store and ends. The connections of the others break by
that; they find the cause in the store and end with one line each, so the cause is printed first.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from graft.deadlines import Wait, skip_frames_in, within
from graft.ours import FOLDERS, is_ours
from graft.train.distributed.heartbeat import ProcessesLost, ProcessFailure, RankHeartbeat
from graft.train.distributed.rank_status import name_ranks
from graft.trust.masking import mask

skip_frames_in(__file__)

GRACE = 10.0
"""Seconds that a process has to end by an exception when another has failed."""
LINK_ERRORS = ("gloo", "nccl", "connection closed by peer", "connection reset", "broken pipe")


def describe(error: BaseException) -> str:
    """The text of an error of graft's; of any other also its traceback."""
    text = f"{error}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    is_plain = isinstance(error, ValueError | ImportError | OSError)
    if is_ours(type(error)) or (is_plain and frames and frames[-1].filename.startswith(FOLDERS)):
        return text
    trace = "".join(traceback.format_exception(error)).rstrip()
    return f"{type(error).__name__}: {text}\n{trace}"


def to_stderr(text: str) -> None:
    sys.stderr.write(f"graft: {text}\n".replace("\n", "\n       ").rstrip(" "))
    sys.stderr.flush()


def is_broken_link(error: BaseException) -> bool:
    """Whether a connection between processes broke; torch has a class for some of these only."""
    if isinstance(error, ProcessesLost) or not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(part in text for part in LINK_ERRORS)


class FailureHandler:
    """Ends this process when it or another one fails, with the cause on the screen."""

    def __init__(self, heartbeat: RankHeartbeat, release: Callable[[], None]) -> None:
        """`release` is the group's exit hook, which must not run while connections hang."""
        self.heartbeat, self.release = heartbeat, release
        self.known: ProcessFailure | None = None
        """The failure of another rank, once it is known."""
        self.is_guarded = False
        self._is_ending = False

    @contextmanager
    def guarded(self, describe: Callable[[BaseException], str]) -> Iterator[None]:
        """End the process with exit code 1 on an exception, after printing and posting it."""
        self.is_guarded = True
        try:
            yield
        except KeyboardInterrupt:
            if self.heartbeat.is_stopped:  # the group was closed inside
                raise
            failure = self.find(patience=0.5)
            if failure is None:
                rank = self.heartbeat.rank
                self.heartbeat.post(ProcessFailure(rank, "interrupted", "", time.time()))
            elif failure.kind != "interrupted":
                self._stop_because(failure)
            raise
        except Exception as error:
            if self.heartbeat.is_stopped:
                raise
            self._fail(error, describe)
        finally:
            self.is_guarded = False

    def explain(self, error: BaseException, what: str) -> ProcessesLost:
        """Why `what` broke: a rank failed, ended, or did not arrive in time."""
        heartbeat = self.heartbeat
        is_late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        if is_late:
            failure = self.find(patience=0.5)
        else:  # reports are read up to one interval after they were written
            failure = self.find(heartbeat.patience + heartbeat.interval, or_gone=True)
        if failure is not None:
            return ProcessesLost(f"{what} failed: {failure}", failure)
        heartbeat.refresh()
        statuses = heartbeat.statuses().items()
        missing = [r for r, s in statuses if s.collective != what and r != heartbeat.rank]
        table = "".join(f"\n{who} {does}" for who, does in heartbeat.table().items())
        if not is_late:
            seen = str(error).partition("\n")[0]
            return ProcessesLost(f"the connections broke at {what} ({seen}).{table}")
        who = "all ranks wait for it: the network between them may be at fault"
        if missing:
            who = f"{name_ranks(missing)} did not arrive"
        return ProcessesLost(
            f"waited {heartbeat.deadline:g} s for {what}, and {who}. If the work really takes that "
            f"long, raise parallel.deadline.{table}"
        )

    def find(self, patience: float, or_gone: bool = False) -> ProcessFailure | None:
        """The failure that another rank has posted, or a rank that stopped reporting without one."""
        end = time.monotonic() + patience
        while True:
            found = self.known or self.heartbeat.posted()
            if found is None and or_gone and (gone := self.heartbeat.gone()) is not None:
                found = self.heartbeat.posted() or gone  # posted just before it ended
            if found is not None or time.monotonic() > end:
                return found
            time.sleep(0.05)

    def on_failure(self, failure: ProcessFailure) -> None:
        """Called by the heartbeat's thread: another rank has failed while this one is busy."""
        self.known = failure
        if self._is_ending or not self.is_guarded:
            return
        if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.SIG_DFL, None):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        end = time.monotonic() + GRACE
        while self.is_guarded and not self._is_ending and time.monotonic() < end:
            time.sleep(0.05)
        if self.is_guarded and not self._is_ending:  # the main thread does not react to signals
            self._stop_because(failure)

    def on_late(self, wait: Wait) -> None:
        """Called by the same thread: NCCL hangs past the deadline, where no exception can be raised."""
        if self.is_guarded and not self._is_ending:
            self._fail(self.explain(TimeoutError("timed out"), wait.what), describe)

    def _fail(self, error: BaseException, describe: Callable[[BaseException], str]) -> NoReturn:
        self._begin_ending()
        heartbeat = self.heartbeat
        if is_broken_link(error):
            error = self.explain(error, "a collective operation")
        cause = error.cause if isinstance(error, ProcessesLost) else None
        if cause is not None and cause.kind != "gone":
            self._stop_because(cause)
        text = describe(error)
        mine = cause or ProcessFailure(
            heartbeat.rank, "failed", text.partition("\n")[0], time.time()
        )
        before = None if heartbeat.claim() else self.find(patience=2.0)
        if before is None:
            host = heartbeat.reports[mine.rank].host
            what = f"is gone: {mine.text}" if mine.kind == "gone" else f"failed: {text}"
            to_stderr(f"rank {mine.rank} of {heartbeat.world} on {host} {what}")
            heartbeat.post(mine)
            _write_error_file(text, mine.at)
            self._exit()
        if not isinstance(error, ProcessesLost) and mine.text != before.text:
            to_stderr(f"rank {heartbeat.rank} failed too: {mine.text}")
        self._stop_because(before)

    def _stop_because(self, failure: ProcessFailure) -> NoReturn:
        self._begin_ending()
        text = f"rank {self.heartbeat.rank} stops, because {failure}"
        to_stderr(text)
        # torchrun takes the earliest error file for the cause, to the second
        _write_error_file(text, max(time.time(), failure.at + 1))
        self._exit()

    def _begin_ending(self) -> None:
        self._is_ending = True
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # ending takes seconds and must finish

    def _exit(self) -> NoReturn:
        """End now, even if threads and connections hang."""
        self.heartbeat.linger()
        atexit.unregister(self.release)
        with suppress(TimeoutError, Exception):
            within(3.0, atexit._run_exitfuncs)  # sandboxes and workers have to be closed
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)


def _write_error_file(text: str, at: float) -> None:
    """Write it in the form in which torchrun lists the failures of its processes."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(at))}
        with suppress(OSError):
            content = {"message": {"message": text.partition("\n")[0], "extraInfo": extra}}
            Path(path).write_text(mask(json.dumps(content)), encoding="utf-8")
