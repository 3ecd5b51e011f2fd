"""A small process that ends the agents of a run that was killed: SIGKILL, or out of memory.

    run     "+4711 8123 /tmp/graft-agent-x"      the supervisor of an agent with this mark has started
    run     "-4711"                              it has ended
    (the run is killed, so its pipe ends)        the reaper has the supervisors that are left end their agents

A mark is a limit on a resource that no agent uses. All that an agent starts inherits it, and unlike a
variable, a group or a parent it stays when a daemon begins anew: by it the agent's processes are found that
its supervisor, killed by the agent, could not end. It runs this file, with the standard library only.
"""

from __future__ import annotations

import atexit
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

LIMIT = "RLIMIT_RTTIME"
"""The resource: microseconds in a row of a process with real-time priority. Not on macOS."""
LIMIT_LINE = b"Max realtime timeout"
"""Its line in /proc/PID/limits: the soft limit, the hard one, "us"."""
MAX_MARK = 1 << 62
SEPARATOR = "\t"
END_SECONDS = 5.0
"""For supervisors to end their agents."""


class Reaper:
    """The pipe to that process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the run
        )
        atexit.register(self.close)

    def watch(self, pid: int, mark: int, *folders: str) -> None:
        """End this process and remove the folders where the run ends before `forget`."""
        self._write(f"+{pid} {mark} {SEPARATOR.join(folders)}\n")

    def forget(self, pid: int) -> None:
        self._write(f"-{pid}\n")

    def close(self) -> None:
        """The end of the run: what is still watched is killed."""
        with suppress(OSError):
            self._process.communicate(timeout=10)

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(
            OSError, ValueError
        ):  # somebody has killed it; the run ends its agents itself
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


@cache
def reaper() -> Reaper:
    """The one of this process; it is started with the first agent."""
    return Reaper()


def kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def new_mark() -> int:
    """A mark for the processes of an agent; 0: this system has none. It is below this process's own limit,
    which only root could raise."""
    if not hasattr(resource, LIMIT):
        return 0
    _, hard = resource.getrlimit(getattr(resource, LIMIT))
    limit = MAX_MARK if hard == resource.RLIM_INFINITY else min(hard, MAX_MARK)
    return limit - 1 - int.from_bytes(os.urandom(8)) % (limit // 2)


def kill_marked(mark: int) -> None:
    """Kill the processes with this mark until none is left: one may just have started another."""
    until = time.monotonic() + END_SECONDS
    while mark and (pids := marked(mark)) and time.monotonic() < until:
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def marked(mark: int) -> list[int]:
    pids = []
    for file in Path("/proc").glob("[0-9]*/limits"):
        with suppress(OSError):
            line = file.read_bytes().partition(LIMIT_LINE)[2].split(maxsplit=2)
            if line[1:2] == [b"%d" % mark] and not _is_zombie(file.parent):
                pids.append(int(file.parent.name))
    return pids


def main() -> None:
    watched: dict[int, list[str]] = {}
    for line in sys.stdin:
        pid, *rest = line[1:].rstrip("\n").split(" ", 2)
        if line[0] == "+":
            watched[int(pid)] = rest
        else:
            watched.pop(int(pid), None)
    for pid in watched:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + END_SECONDS
    while any(map(_is_there, watched)) and time.monotonic() < until:
        time.sleep(0.02)
    for pid, (mark, folders) in watched.items():
        kill_group(pid)
        kill_marked(int(mark))
        for folder in folders.split(SEPARATOR):
            shutil.rmtree(folder, ignore_errors=True)


def _is_zombie(folder: Path) -> bool:
    return (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _is_there(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


if __name__ == "__main__":
    main()
