"""A control group (cgroup v2) for each call: the kernel adds up all that its processes use.

The folder of the host's groups is open as GROUPS. In the group of a call:

    7/memory.max         its memory and its disk, and what it takes to run at all
    7/memory.oom.group   1: a call that needs more is killed, all of its processes
    7/pids.max           its processes and threads
    7/cgroup.kill        ends all of them at once

To make and remove a group costs an eighth of a quick call, so a group whose call has ended by itself
serves a later call. After any other end it is removed.
"""

from __future__ import annotations

import contextlib
import os

from . import kernel
from .confinement import TRIAL, Limits
from .seccomp import GROUPS

READ = os.O_RDONLY | os.O_CLOEXEC
KERNEL_MEMORY = 16 << 20
"""Page tables, stacks, inodes: what the kernel keeps for the processes of a call."""
MAX_FREE = 8


def room(limits: Limits, inherited: int, num_processes: int) -> int:
    """The bytes that a call may take in all.

    The other limits allow it its memory, a tenth of that in buffers, and its disk, which is memory too.
    `inherited`: memory of the host, of which every process gets a copy when it writes to it.
    """
    memory = limits.memory + limits.memory // 10
    return memory + limits.disk + KERNEL_MEMORY + inherited * num_processes


def count(events: str, name: str) -> int:
    """count("low 0\\noom_kill 2\\n", "oom_kill") -> 2; 0 if the kernel does not know it."""
    for line in events.splitlines():
        key, _, number = line.partition(" ")
        if key == name and number.isdecimal():
            return int(number)
    return 0


class CallGroup:
    """One control group. OSError if it cannot be made."""

    def __init__(self, name: str, inherited: int) -> None:
        self.name = name
        self.inherited = inherited
        self.is_killed = False
        self._written: dict[str, int] = {}
        os.mkdir(name, dir_fd=GROUPS)
        self._folder = os.open(name, READ | os.O_DIRECTORY, dir_fd=GROUPS)

    def limit(self, limits: Limits) -> None:
        """Set the limits of the next call."""
        self.limits = limits
        self.fit(1)
        self._set("memory.oom.group", 1)
        self._set("pids.max", limits.processes)

    def fit(self, num_processes: int) -> None:
        """Allow what this number of processes may take."""
        self._set("memory.max", room(self.limits, self.inherited, num_processes))

    def fork(self) -> int:
        """Fork as os.fork does; the child is in the group from its first moment."""
        return kernel.fork_into(self._folder)

    def kill(self) -> None:
        """Kill the group for good: some kernels also kill what is forked into it afterwards."""
        self.is_killed = True
        with contextlib.suppress(OSError):  # somebody has removed it
            self._write("cgroup.kill", 1)

    def is_out_of_memory(self) -> bool:
        """Whether the kernel has killed its call for its memory."""
        try:
            file = os.open(f"{self.name}/memory.events", READ, dir_fd=GROUPS)
        except OSError:  # somebody has removed it
            return False
        try:
            return count(os.read(file, 4096).decode(), "oom_kill") > 0
        finally:
            os.close(file)

    def remove(self) -> bool:
        """False while one of its processes has not ended."""
        try:
            os.rmdir(self.name, dir_fd=GROUPS)
        except FileNotFoundError:
            pass
        except OSError:
            return False
        os.close(self._folder)
        return True

    def _set(self, name: str, value: int) -> None:
        if self._written.get(name) != value:
            self._write(name, value)
            self._written[name] = value

    def _write(self, name: str, value: int) -> None:
        file = os.open(f"{self.name}/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=GROUPS)
        try:
            os.write(file, b"%d" % value)
        finally:
            os.close(file)


class CallGroups:
    """The control groups of a host."""

    def __init__(self, inherited: int) -> None:
        self.inherited = inherited
        self.num_made = 0
        self.free: list[CallGroup] = []
        self.left: list[CallGroup] = []
        """Those that could not be removed yet: a process in them has not ended."""

    def open(self, limits: Limits) -> CallGroup:
        self.left = [group for group in self.left if not group.remove()]
        if self.free:
            group = self.free.pop()
        else:
            self.num_made += 1
            group = CallGroup(str(self.num_made), self.inherited)
        try:
            group.limit(limits)
        except OSError:
            self.close(group)
            raise
        return group

    def close(self, group: CallGroup, *, is_empty: bool = False) -> None:
        """Close a group after its call. `is_empty`: it has ended by itself, with all of its processes."""
        if is_empty and not group.is_killed and len(self.free) < MAX_FREE:
            self.free.append(group)
        elif not group.remove():  # with "none" a call may have left processes
            group.kill()
            self.left.append(group)


def enter(folder: int) -> bool:
    """Keep the folder as GROUPS, and try a group with a child that ends at once. False if that fails:
    the kernel is too old, or the runtime of a container refuses clone3."""
    os.dup2(folder, GROUPS, inheritable=False)
    os.close(folder)
    groups = CallGroups(0)
    try:
        group = groups.open(TRIAL)
    except OSError:
        return False
    try:
        pid = group.fork()
        if pid == 0:
            os._exit(0)
        return os.waitpid(pid, 0)[1] == 0
    except OSError:
        return False
    finally:
        groups.close(group)
