"""What one call may do. A forked child walks in here and comes out confined, or not at all.

With namespaces the child is the first process of its own pid namespace: when it ends, however it
ends, the kernel ends everything it started. It has a mount namespace with a disk of its own. Without
namespaces it may not start processes at all, so that there is nothing to be left over.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import NamedTuple

from . import kernel, landlock, room, seccomp

HARD = {
    what: resource.getrlimit(what)[1]
    for what in (
        resource.RLIMIT_CORE,
        resource.RLIMIT_FSIZE,
        resource.RLIMIT_NOFILE,
        resource.RLIMIT_AS,
        resource.RLIMIT_CPU,
        resource.RLIMIT_NPROC,
    )
}
SIGKILL = 9
FIRST_USER = 1_000_000_000  # of a range that no system hands out
USERS_PER_HOST = 256
PLACEHOLDER = 0x7A5B_C3D1  # of the process's own number in a filter that is prepared beforehand
COUNTS_PER_USER_NAMESPACE = (5, 14)  # since this Linux, RLIMIT_NPROC does


class Limits(NamedTuple):
    """What a call may use. It travels as a line of numbers, in this order."""

    cpu: int
    """Seconds of processor time; 0: the caller watches the clock."""
    memory: int
    """Bytes of address space, beyond what the host has already loaded."""
    disk: int
    """Bytes, of any file and of the scratch folder."""
    processes: int
    """Processes and threads at one time."""
    files: int
    """Open at one time."""


TRIAL = Limits(cpu=1, memory=1 << 30, disk=1 << 20, processes=8, files=16)


class Walls:
    """How this host confines its children; prepared once, so that a call costs little."""

    def __init__(self, method: str, readable: list[str], users: int, scratch: str) -> None:
        self.method = method
        self.readable = readable
        self.users = users
        self.is_root = room.is_privileged() if method != "landlock" else os.geteuid() == 0
        self.is_nested = method in ("bubblewrap", "namespaces")
        """Whether every child gets a pid and a mount namespace of its own."""
        self.has_landlock = method == "landlock"
        self.scratch = scratch
        self.filters: dict[bool, bytes] = {}
        if method != "none":
            for is_nested, process in ((True, None), (False, PLACEHOLDER)):
                code = seccomp.cell_program(kernel.machine, only_process=process)
                self.filters[is_nested] = seccomp.build_run(code)
        self.num_users = room.num_users() if self.is_root else 0
        release = os.uname().release.split(".")
        self.counts_alone = (int(release[0]), int(release[1])) >= COUNTS_PER_USER_NAMESPACE
        self.loaded = 0

    def settle(self) -> None:
        """Put the host itself under the first filter, and note its size, which its children inherit."""
        if self.method != "none":
            # the others go with the change of user; these would be handed down
            kernel.clear_inheritable_capabilities()
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
            seccomp.install(
                seccomp.build_run(seccomp.host_program(kernel.machine, is_root=self.is_root))
            )
        with open("/proc/self/statm") as file:  # noqa: PTH123
            self.loaded = int(file.read().split()[0]) * resource.getpagesize()

    def user(self, slot: int) -> int:
        """A user id for this child alone: what it counts, owns and may signal is its own."""
        offset = self.users * USERS_PER_HOST + slot % USERS_PER_HOST
        if self.num_users > FIRST_USER + offset:
            return FIRST_USER + offset
        return 20_000 + offset % 10_000  # a container with 65536 ids

    def open_scratch(self, slot: int) -> str | None:
        """A folder for a child without a disk of its own; the host removes it afterwards."""
        if self.is_nested:
            return None
        path = f"{self.scratch}/{slot}"
        os.mkdir(path, 0o700)  # noqa: PTH102
        if self.is_root and self.method != "none":
            os.chown(path, self.user(slot), self.user(slot))
        return path

    def enter(self, slot: int, limits: Limits, scratch: str | None) -> None:
        """Confine this process. Whatever raises here must end it: nothing may run half confined."""
        if self.method == "none":
            os.setsid()
            kernel_limits(limits, None, self.loaded)
            os.chdir(str(scratch))
            return
        user = self.user(slot) if self.is_root else None
        processes = limits.processes
        if not self.is_root and not (self.is_nested and self.counts_alone):
            processes += _num_tasks()  # the limit counts what the user runs elsewhere
        if self.is_nested:
            self._enter_namespaces(user, limits)
        else:
            parent = os.getppid()
            os.setsid()
            self._drop_privileges(user)
            # after the change of user, which would clear it
            kernel.prctl(kernel.PR_SET_PDEATHSIG, SIGKILL)
            if os.getppid() != parent:
                raise OSError("the host is gone")
        kernel_limits(limits, processes, self.loaded)
        if self.has_landlock:
            devices = [f"/dev/{name}" for name in room.DEVICES]
            landlock.restrict(self.readable, [str(scratch), *devices])
        if not (self.is_nested and self.is_root):  # that one has no privileges the rest could use
            own = os.getpid().to_bytes(4, sys.byteorder)
            placeholder = PLACEHOLDER.to_bytes(4, sys.byteorder)
            seccomp.install(self.filters[self.is_nested].replace(placeholder, own))
        os.chdir(scratch or room.SCRATCH)
        if scratch is not None:
            os.environ["HOME"] = os.environ["TMPDIR"] = scratch

    def try_nesting(self, own_pids: int) -> bool:
        """Whether a child can have namespaces of its own here; tried with one that ends at once."""
        try:
            kernel.unshare(kernel.NEWPID)
        except OSError:
            return False
        pid = os.fork()
        if pid == 0:
            try:
                self.enter(0, TRIAL, None)
            except BaseException:
                os._exit(1)
            os._exit(0)
        kernel.setns(own_pids, kernel.NEWPID)
        return os.waitpid(pid, 0)[1] == 0

    def _enter_namespaces(self, user: int | None, limits: Limits) -> None:
        kernel.unshare(kernel.NEWNS)
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        disk = b"size=%d,nr_inodes=4096,mode=1777" % limits.disk
        kernel.mount(b"tmpfs", b"/scratch", b"tmpfs", flags, disk)
        kernel.mount(b"/empty", b"/proc", b"", kernel.MS_BIND)
        if user is None:
            kernel.unshare(kernel.NEWUSER)  # nobody in a namespace that owns nothing
            kernel.drop_capabilities()
        else:
            self._drop_privileges(user)

    def _drop_privileges(self, user: int | None) -> None:
        if user is None:
            return
        if not self.is_nested:  # Python may lie in root's home; Landlock decides what is read
            kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        if not self.is_nested:
            kernel.keep_capability(kernel.CAP_DAC_READ_SEARCH)


def kernel_limits(limits: Limits, processes: int | None, loaded: int) -> None:
    """The kernel's own limits on this process and its children."""
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, limits.disk)
    _limit(resource.RLIMIT_NOFILE, limits.files)
    _limit(resource.RLIMIT_AS, loaded + limits.memory)
    if limits.cpu:
        _limit(resource.RLIMIT_CPU, limits.cpu)
    if processes is not None:
        _limit(resource.RLIMIT_NPROC, processes)


def _limit(what: int, value: int) -> None:
    hard = HARD[what]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(what, (value, value))


def _num_tasks() -> int:
    """Threads that exist on this machine: at least as many as this user has."""
    with open("/proc/loadavg") as file:  # noqa: PTH123
        return int(file.read().split()[3].partition("/")[2])
