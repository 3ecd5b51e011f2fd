"""The parent of an agent's program: what the program starts ends with it, wherever it has gone.

    run ── supervisor ── program ── setsid env -i daemon &
                     └── daemon          its parent has ended: Linux gives it to the nearest subreaper

A process may leave its group, its session and its environment; its ancestors it cannot. When the program
ends, or the run says so (SIGTERM), the supervisor kills its descendants until none is left, then ends as the
program did. In a control group of version 2, where one can be made, the kernel kills them, and also those of
a program that has killed this process. It runs this file, with the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NoReturn

SET_CHILD_SUBREAPER = 36
"""Of prctl."""
NOT_STARTED = 127
ROUND_SECONDS = 0.005
REMOVE_SECONDS = 1.0
"""For a control group whose processes were killed to become empty."""


class Stopped(Exception):
    """The run ends the program."""


def main() -> NoReturn:
    cgroup, *words = sys.argv[1:]
    signal.signal(signal.SIGTERM, _stop)
    with suppress(AttributeError, OSError):  # not on macOS
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    status = signal.SIGTERM
    try:
        child = os.fork()
        if not child:
            _become(words, cgroup)
        status = _wait(child)
    except Stopped:
        pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_descendants()
    remove_cgroup(cgroup)
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    with suppress(OSError):  # SIGKILL has no handler
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(1)


def _stop(number: int, frame: object) -> None:
    raise Stopped


def _become(words: list[str], cgroup: str) -> NoReturn:
    """The program, in a session of its own: Ctrl-C reaches the run alone, and `kill 0` only itself."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        if cgroup:
            with suppress(OSError):
                Path(cgroup, "cgroup.procs").write_text("0")
        os.execvp(words[0], words)
    except BaseException as error:
        os.write(2, f"the agent {words[0]!r} cannot be started: {error}\n".encode())
    os._exit(NOT_STARTED)


def _wait(child: int) -> int:
    """The status of the program; orphans that end before it are reaped."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return status


def end_descendants() -> None:
    """Kill them until none is left: one that is killed may just have started another."""
    if not Path("/proc/self/stat").exists():
        return
    while True:
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(ROUND_SECONDS)


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(folder.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


@cache
def cgroup_parent() -> Path | None:
    """The control group of version 2 of this process; None: there is none."""
    with suppress(OSError, StopIteration, IndexError):
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        mount = next(line.split()[4] for line in mounts if " - cgroup2 " in line)
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line[3:] for line in groups if line.startswith("0::"))
        return Path(mount, own.lstrip("/"))
    return None


def make_cgroup(name: str) -> str:
    """The folder of a new control group; "": none can be made here."""
    with suppress(OSError):
        if (parent := cgroup_parent()) is not None:
            made = parent / name
            made.mkdir()
            if (made / "cgroup.kill").exists():  # Linux 5.14
                return str(made)
            made.rmdir()
    return ""


def remove_cgroup(cgroup: str) -> None:
    """Kill what is in a control group, and remove it."""
    until = time.monotonic() + REMOVE_SECONDS
    while cgroup and Path(cgroup).exists() and time.monotonic() < until:
        with suppress(OSError):
            Path(cgroup, "cgroup.kill").write_text("1")
            Path(cgroup).rmdir()
            return
        time.sleep(ROUND_SECONDS)


if __name__ == "__main__":
    main()
