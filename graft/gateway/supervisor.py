"""The parent of an agent's program: what the program starts ends with it, wherever it has gone.

    run ── supervisor ── program ── setsid env -i daemon &
                     └── daemon          its parent has ended: Linux gives it to the nearest subreaper

A process may leave its group, its session and its environment; its ancestors it cannot. When the program
ends, or the run says so (SIGTERM), the supervisor kills its descendants until none is left, then ends as the
program did. Besides, one of these holds them (supervision.py chooses):

control group   of version 2: the kernel kills all that is in it
pid namespace   the kernel kills all that is in it when its first process ends, which is a child of the
                supervisor; the program sees no process outside, and so can kill neither
subreaper       nothing else

A program that kills its supervisor is answered by the run, which kills what has the program's mark
(reaper.py). It runs this file, with the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

CGROUP, NAMESPACE, SUBREAPER = "control group", "pid namespace", "subreaper"
SET_CHILD_SUBREAPER = 36
"""Of prctl."""
NOT_STARTED = 127
ROUND_SECONDS = 0.005
REMOVE_SECONDS = 1.0
"""For a control group whose processes were killed to become empty."""


class Stopped(Exception):
    """The run ends the program."""


def main() -> NoReturn:
    method, system_calls, cgroup, mark, *words = sys.argv[1:]
    signal.signal(signal.SIGTERM, _stop)
    with suppress(AttributeError, OSError):  # not on macOS
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    run = partial(_run, partial(_become, words, cgroup, int(mark)))
    status: int = signal.SIGTERM
    with suppress(Stopped):
        status = _run_in_namespace(run, system_calls) if method == NAMESPACE else run()
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


def _run(become: Callable[[], NoReturn]) -> int:
    """Wait for a child that becomes the program."""
    return _wait(os.fork() or become())


def _run_in_namespace(run: Callable[[], int], system_calls: str) -> int:
    """Wait for the first process of a new pid namespace, whose child the program is.

    system_calls   the folder with `kernel.py`, which needs the standard library only
    """
    sys.path.append(system_calls)
    kernel = import_module("kernel")
    user = os.geteuid()
    if user:  # root has the right to do so, and would lose others in a user namespace
        kernel.unshare_as(user, os.getegid(), kernel.NEWPID)
    else:
        kernel.unshare(kernel.NEWPID)
    reading, writing = os.pipe()
    first = os.fork() or _lead(kernel, run, writing)
    os.close(writing)
    status = _wait(first)
    return int(os.read(reading, 32) or status)


def _lead(kernel: Any, run: Callable[[], int], writing: int) -> NoReturn:
    """Be the first process of the namespace: it ends with the supervisor, and all others with it."""
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGINT):  # no process inside can end it
            signal.signal(number, signal.SIG_DFL)
        kernel.unshare(kernel.NEWNS)  # the folder /proc of the namespace, for its processes alone
        kernel.mount(b"none", b"/", b"", kernel.MS_REC | kernel.MS_SLAVE)
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        kernel.mount(b"proc", b"/proc", b"proc", flags)
        os.write(writing, b"%d" % run())
        os._exit(0)
    except BaseException as error:
        os.write(2, f"no pid namespace for the agent: {error}\n".encode())
    os._exit(NOT_STARTED)


def _become(words: list[str], cgroup: str, mark: int) -> NoReturn:
    """The program, in a session of its own: Ctrl-C reaches the run alone, and `kill 0` only itself."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        if cgroup:
            Path(cgroup, "cgroup.procs").write_text("0")
        if mark:
            resource.setrlimit(resource.RLIMIT_RTTIME, (mark, mark))
        os.execvp(words[0], words)
    except BaseException as error:
        os.write(2, f"the agent {words[0]!r} cannot be started: {error}\n".encode())
    os._exit(NOT_STARTED)


def _wait(child: int) -> int:
    """The status of a child; orphans that end before it are reaped."""
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
    pids = [pid]
    for parent in pids:
        pids += children.get(parent, [])
    return pids[1:]


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
