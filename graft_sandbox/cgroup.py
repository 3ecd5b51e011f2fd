"""Control groups (cgroup v2): where this user may make them, and the one that holds a host's calls.

    app.slice                       owned by the user, with memory and pids for its children
    ├── run-u7.scope                this process, which is never moved
    └── graft-1f3a9c0b              one host; its lock is held as long as the host or this process lives
        ├── 1                       its first call: memory.max, pids.max (inside/cgroup.py)
        └── 2

Most machines without a systemd user session have no such folder; calls then have no control group.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

CONTROLLERS = {"memory", "pids"}
PREFIX = "graft-"
ATTEMPTS = 3
"""Another process that removes old groups can take a new one for such."""
REMOVE_SECONDS = 2.0
"""How long the processes of a group may take to end."""


class HostGroup:
    """The folder of one host's calls. OSError if the kernel or another process is against it."""

    def __init__(self, parent: Path) -> None:
        self.path = parent / f"{PREFIX}{secrets.token_hex(4)}"
        self.path.mkdir()
        self.descriptor = -1
        """The open folder, for the host."""
        try:
            self.descriptor = _lock(self.path)
            if not (self.path / "cgroup.kill").exists():
                raise OSError("the kernel is older than Linux 5.14")
            _write(self.path / "cgroup.subtree_control", "+memory +pids")
            if (swap := self.path / "memory.swap.max").exists():  # not in a kernel without swap
                _write(swap, "0")  # holds for the groups below too
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the calls that are left, and remove the folder."""
        remove(self.path)
        self.forget()

    def forget(self) -> None:
        """Close the descriptor; the folder stays, for the process that made it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


def open_group() -> HostGroup | None:
    """A folder for a new host's calls; None where this user may not make any."""
    parent = own_parent()
    if parent is None:
        return None
    remove_abandoned(parent)
    for _ in range(ATTEMPTS):
        with contextlib.suppress(OSError):
            return HostGroup(parent)
    return None


def own_parent() -> Path | None:
    """`find_parent` for this process."""
    try:
        membership = Path("/proc/self/cgroup").read_text()
        return find_parent(membership, Path("/proc/self/mountinfo").read_text())
    except OSError:  # not Linux
        return None


def find_parent(membership: str, mountinfo: str) -> Path | None:
    """The nearest folder above a process in which this user may make groups with the CONTROLLERS.

    `membership` is its /proc/PID/cgroup, "0::/user.slice/..." in version 2. None if there is no such
    folder, and if a group below it has a limit of memory: the calls would be outside that limit.
    """
    lines = [line for line in membership.splitlines() if line.startswith("0::/")]
    group = lines[0].removeprefix("0::") if lines else "/.."
    for root, mounted in cgroup2_mounts(mountinfo):
        path = os.path.relpath(group, root)
        if ".." in (*Path(group).parts, *Path(root).parts, *Path(path).parts):
            continue  # outside the namespace, or outside what is mounted
        own = mounted / path
        for folder in (own, *own.parents):
            if _is_delegated(folder):
                return folder
            if folder == mounted or _is_limited(folder):
                break
    return None


def cgroup2_mounts(mountinfo: str) -> Iterator[tuple[str, Path]]:
    """("/", /sys/fs/cgroup): the group at the top of each mount, and where it is mounted."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 "):
            root, mounted = before.split()[3:5]
            yield root, Path(mounted)


def remove_abandoned(parent: Path) -> None:
    """Remove the groups of hosts that have ended without doing so, as after SIGKILL."""
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # of a living process or another user, or just removed
            if path.stat().st_uid != os.geteuid():
                continue
            descriptor = _lock(path)
            try:
                remove(path)
            finally:
                os.close(descriptor)


def remove(path: Path) -> None:
    """Kill what is in a group and remove it. What does not end in time stays, for a later start."""
    deadline = time.monotonic() + REMOVE_SECONDS
    with contextlib.suppress(OSError):
        _write(path / "cgroup.kill", "1")
    while True:
        try:
            for folder in (*_folders(path), path):
                folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:  # a process has not ended yet
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)


def _folders(path: Path) -> list[Path]:
    return [Path(entry.path) for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]


def _is_delegated(folder: Path) -> bool:
    """Whether groups can be made here: as the kernel's documentation names it, the folder and two of
    its files belong to this user; and its children have the CONTROLLERS."""
    needed = (folder, folder / "cgroup.procs", folder / "cgroup.subtree_control")
    if not all(os.access(path, os.W_OK) for path in needed):
        return False
    return set(needed[-1].read_text().split()) >= CONTROLLERS


def _is_limited(folder: Path) -> bool:
    """Whether somebody has set a limit of memory for this group."""
    limits = [folder / name for name in ("memory.max", "memory.high")]
    return any(limit.exists() and limit.read_text().strip() != "max" for limit in limits)


def _lock(path: Path) -> int:
    """The open folder, locked; BlockingIOError if another process has it. Hosts inherit the lock: it
    ends with the last process that holds the descriptor."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _write(path: Path, text: str) -> None:
    """Write to a file that exists: the kernel makes them, nobody else can."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
