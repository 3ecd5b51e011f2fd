"""What holds the processes of an agent's program on this machine: each method is tried once.

choose()      "pid namespace": the first that works of "control group", "pid namespace", "subreaper"
methods()     {"control group": "none of version 2 can be made in /sys/fs/cgroup", "pid namespace": "", ...}
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from graft.gateway import supervisor
from graft.gateway.supervisor import CGROUP, NAMESPACE, SUBREAPER, remove_cgroup
from graft.registry import UnknownName, load_service

TRIAL_SECONDS = 20.0


def choose() -> str:
    """The first method that works here."""
    return next(method for method, reason in methods().items() if not reason)


@cache
def methods() -> dict[str, str]:
    """Why each method does not work here, "" if it does; each is tried once, with a program that ends."""
    return {CGROUP: _try(CGROUP), NAMESPACE: _try(NAMESPACE), SUBREAPER: ""}


def _try(method: str) -> str:
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    cgroup = make_cgroup() if method == CGROUP else ""
    if method == CGROUP and not cgroup:
        return f"none of version 2 can be made in {cgroup_parent()}"
    try:
        words = command(method, cgroup, 0, [sys.executable, "-I", "-S", "-c", ""])
        trial = subprocess.run(words, capture_output=True, timeout=TRIAL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired, UnknownName) as error:
        return str(error)
    finally:
        remove_cgroup(cgroup)
    output = trial.stderr.decode(errors="replace").strip() or f"exit code {trial.returncode}"
    return output.rpartition("\n")[2] if trial.returncode else ""


def command(method: str, cgroup: str, mark: int, words: Sequence[str]) -> list[str]:
    """The command that runs `words` below a supervisor. cgroup: a folder of `make_cgroup`, or ""."""
    start = [sys.executable, "-I", "-S", supervisor.__file__]
    system_calls = str(load_service("system_calls")) if method == NAMESPACE else ""
    return [*start, method, system_calls, cgroup, str(mark), *words]


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


def make_cgroup() -> str:
    """The folder of a new control group; "": none can be made here."""
    with suppress(OSError):
        if (parent := cgroup_parent()) is not None:
            folder = parent / f"graft-agent-{os.getpid()}-{secrets.token_hex(4)}"
            folder.mkdir()
            if (folder / "cgroup.kill").exists():  # Linux 5.14
                return str(folder)
            folder.rmdir()
    return ""
