"""A small process that ends the agents of a run that was killed: SIGKILL, or out of memory.

    run     "+4711 5d0c7a /tmp/graft-agent-x"    the supervisor of an agent has started
    run     "-4711"                              it has ended
    (the run is killed, so its pipe ends)        the reaper has the supervisors that are left end their agents

It runs this file, with the standard library only.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

MARK = "GRAFT_SESSION"
"""Variable by which children that have left the process group are found."""
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

    def watch(self, pid: int, session: str, *folders: str) -> None:
        """End this process and remove the folders where the run ends before `forget`."""
        self._write(f"+{pid} {session or '-'} {SEPARATOR.join(folders)}\n")

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


def kill_marked(session: str) -> None:
    """Kill processes of this session outside of its group: those that began a group of their own."""
    mark = f"{MARK}={session}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


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
    for pid, (session, folders) in watched.items():
        kill_group(pid)
        if session != "-":
            kill_marked(session)
        for folder in folders.split(SEPARATOR):
            shutil.rmtree(folder, ignore_errors=True)


def _is_there(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


if __name__ == "__main__":
    main()
