"""Confine a forked child before it runs code.

With namespaces the child is the first process of its own pid namespace: when it ends, for any reason,
the kernel ends everything it started. Its mount namespace has its own disk. Without namespaces it may
not start processes, so that none can outlive it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from _socket import SCM_RIGHTS, SOL_SOCKET, socket
from typing import NamedTuple

from . import kernel, landlock, rootfs, seccomp, usage

SIGKILL = 9
DEVICES = [f"/dev/{name}" for name in rootfs.DEVICES]
FIRST_USER = 1_000_000_000  # in a range that no system assigns
USERS_PER_HOST = 256
RLIMIT_SIGPENDING = 11  # missing in `resource`
SIGNALS = 256  # queued signals and timers, which take kernel memory
PLACEHOLDER = 0x7A5B_C3D1  # stands for the process id in a prepared filter
COUNTS_PER_USER_NAMESPACE = (5, 14)  # the Linux version since which RLIMIT_NPROC does
CONTINUES = (5, 5)  # the Linux version since which a listener can let a call continue


class Limits(NamedTuple):
    """The limits of a call; sent as a line of numbers, in this order."""

    cpu: int
    """Seconds of processor time; 0: the caller watches the clock."""
    memory: int
    """Bytes of address space beyond the size of the host."""
    disk: int
    """Bytes of the scratch folder."""
    processes: int
    """Processes and threads at one time."""
    files: int
    """Open at one time."""


TRIAL = Limits(cpu=1, memory=1 << 30, disk=1 << 20, processes=8, files=16)


class Confinement:
    """How this host confines its children; prepared once, so that a call is cheap."""

    def __init__(self, method: str, readable: list[str], users: int, scratch: str) -> None:
        self.method = method
        self.readable = readable
        self.users = users
        self.is_root = rootfs.is_privileged() if method != "landlock" else os.geteuid() == 0
        self.is_nested = method in ("bubblewrap", "namespaces")
        """Whether every child gets its own pid and mount namespace."""
        self.has_landlock = method == "landlock"
        self.scratch = scratch
        self.num_scratch = 0
        self.hiding_rules: int | None = None
        self.has_groups = False
        """Whether every child gets its own control group."""
        self.filters: dict[bool, bytes] = {}
        release = os.uname().release.split(".")
        linux = int(release[0]), int(release[1].partition("-")[0])
        self.counts_per_namespace = linux >= COUNTS_PER_USER_NAMESPACE
        self.can_ask = self.is_nested and linux >= CONTINUES and _can_listen()
        """Whether the kernel can ask the host about new processes; else none can be started."""
        if method != "none":
            for is_nested, process in ((True, None), (False, PLACEHOLDER)):
                program = seccomp.child_program(
                    kernel.machine, only_process=process, can_ask=self.can_ask
                )
                self.filters[is_nested] = seccomp.assemble(program)
        self.num_users = rootfs.num_users() if self.is_root else 0
        is_other_user = self.is_root and not self.is_nested and method != "none"
        self.needs_search = is_other_user and not self._can_be_read_by_others()
        """Whether a child of another user needs root's right to read, as Python is in root's home."""
        self.looks_as_child = is_other_user and not kernel.has_capability(kernel.CAP_SYS_PTRACE)
        """Whether the host must become the child's user to see what it has open."""
        if self.looks_as_child and self.needs_search:
            raise OSError("root without CAP_SYS_PTRACE needs a Python that other users can read")
        self.loaded = 0
        self.writes: int | None = None
        """Where children ask before they write files; None: what they write is only counted."""
        if not self.is_nested and method != "none":
            os.dup2(folder := os.open(scratch, os.O_RDONLY | os.O_CLOEXEC), seccomp.SCRATCH, False)
            os.close(folder)

    def restrict_host(self) -> None:
        """Install the first filter in the host itself, and store its size, which its children inherit."""
        if self.method != "none":
            # the change of user drops the others; children would inherit these
            kernel.clear_inheritable_capabilities()
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
            program = seccomp.host_program(
                kernel.machine, is_root=self.is_root, has_groups=self.has_groups
            )
            kernel.install_filter(seccomp.assemble(program))
        if self.has_landlock and not self.is_nested:
            asking = seccomp.assemble(seccomp.asking_program(kernel.machine))
            with contextlib.suppress(OSError):  # the runtime of a container has the only listener
                self.writes = kernel.install_filter_and_listen(asking)
        with open("/proc/self/statm") as file:  # noqa: PTH123
            self.loaded = int(file.read().split()[0]) * resource.getpagesize()

    def hide(self, hidden: list[str]) -> None:
        """Hide these paths from children if the file tree is the machine's own."""
        if hidden:
            writable = [self.scratch, *DEVICES]
            self.hiding_rules = landlock.hiding_rules(hidden, self.readable, writable)

    def user(self, slot: int) -> int:
        """A user id for this child alone, so that its limits, files and signals are separate."""
        offset = self.users * USERS_PER_HOST + slot % USERS_PER_HOST
        if self.num_users > FIRST_USER + offset:
            return FIRST_USER + offset
        return 20_000 + offset % 10_000  # a container with 65536 ids

    def open_scratch(self, slot: int) -> str | None:
        """A folder for a child without its own disk; the host removes it afterwards."""
        if self.is_nested:
            return None
        # a new name for every call: what an earlier one left cannot be in the way
        self.num_scratch += 1
        path = f"{self.scratch}/{self.num_scratch}"
        if self.method == "none":
            os.mkdir(path, 0o700)  # noqa: PTH102
        else:
            os.mkdir(str(self.num_scratch), 0o700, dir_fd=seccomp.SCRATCH)
        if self.is_root and self.method != "none":
            os.chown(path, self.user(slot), self.user(slot))
        return path

    def enter(self, slot: int, limits: Limits, scratch: str | None, serial: int = 0) -> None:
        """Confine this process. After any exception here it must end: no code may run half confined.

        `serial`: the number of the call, which the host gets with its listener.
        """
        # also a process group of its own: kill(0, ...) must not reach the host and other calls
        os.setsid()
        if self.method == "none":
            kernel_limits(limits, None, self.loaded, limits.disk // usage.FILE_SHARE)
            _limit(resource.RLIMIT_NOFILE, limits.files)
            os.chdir(str(scratch))
            return
        user = self.user(slot) if self.is_root else None
        processes = limits.processes
        if not self.is_root and not (self.is_nested and self.counts_per_namespace):
            processes += _num_tasks()  # the limit also counts the user's other processes
        if self.is_nested:
            self._enter_namespaces(user, limits)
        else:
            parent = os.getppid()
            self._drop_privileges(user)
            # only now: the change of user would clear it
            kernel.prctl(kernel.PR_SET_PDEATHSIG, SIGKILL)
            if os.getppid() != parent:
                raise OSError("the host is gone")
        file_size = limits.disk if self.is_nested else limits.disk // usage.FILE_SHARE
        kernel_limits(limits, processes, self.loaded, file_size)
        if self.has_landlock:
            landlock.restrict(self.readable, [str(scratch), *DEVICES])
            if self.hiding_rules is not None:  # last: the kernel copies all rules of earlier sets
                landlock.enforce(self.hiding_rules)
        if self.is_nested and self.can_ask:
            _send_listener(serial, kernel.install_filter_and_listen(self.filters[True]))
        elif self.is_nested:
            kernel.install_filter(self.filters[True])
        else:
            own = os.getpid().to_bytes(4, sys.byteorder)
            placeholder = PLACEHOLDER.to_bytes(4, sys.byteorder)
            kernel.install_filter(self.filters[False].replace(placeholder, own))
        _limit(resource.RLIMIT_NOFILE, limits.files)
        os.chdir(scratch or rootfs.SCRATCH)
        if scratch is not None:
            os.environ["HOME"] = os.environ["TMPDIR"] = scratch

    def try_nesting(self, own_pids: int) -> bool:
        """Whether a child can have its own namespaces here; tried with a child that ends at once."""
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
        disk = b"size=%d,nr_inodes=%d,mode=1777" % (limits.disk, usage.MAX_FILES)
        kernel.mount(b"tmpfs", b"/scratch", b"tmpfs", flags, disk)
        kernel.mount(b"/empty", b"/proc", b"", kernel.MS_BIND)
        if user is None:
            kernel.unshare(kernel.NEWUSER)  # an unmapped user in a namespace that owns nothing
            kernel.drop_capabilities()
        else:
            self._drop_privileges(user)

    def _drop_privileges(self, user: int | None) -> None:
        if user is None:
            return
        if self.needs_search:  # Landlock limits what is read
            kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        if self.needs_search:
            kernel.keep_capability(kernel.CAP_DAC_READ_SEARCH)
        if not self.is_nested:
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # the change of user has cleared it

    def _can_be_read_by_others(self) -> bool:
        """Tried by a child that becomes another user."""
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                user = self.user(0)
                os.setgroups([])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
                status = int(not all(os.access(path, os.R_OK) for path in self.readable))
            finally:
                os._exit(status)
        return os.waitpid(pid, 0)[1] == 0

    def look_as(self, slot: int | None) -> None:
        """Become the user of this child for looking at it; None: root again."""
        if self.looks_as_child:
            kernel.look_as(0 if slot is None else self.user(slot))


def kernel_limits(limits: Limits, processes: int | None, loaded: int, file_size: int) -> None:
    """The kernel's own limits on this process and its children."""
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, file_size)
    _limit(resource.RLIMIT_AS, loaded + limits.memory)
    _limit(RLIMIT_SIGPENDING, SIGNALS)
    if limits.cpu:
        _limit(resource.RLIMIT_CPU, limits.cpu)
    if processes is not None:
        _limit(resource.RLIMIT_NPROC, processes)


def _can_listen() -> bool:
    """Whether a process can have a listener here; in some containers the runtime has the only one."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
            allow_all = seccomp.assemble([seccomp.back(seccomp.ALLOW)])
            kernel.install_filter_and_listen(allow_all)
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def _send_listener(serial: int, listener: int) -> None:
    channel = socket(fileno=seccomp.LISTENERS)
    rights = [(SOL_SOCKET, SCM_RIGHTS, listener.to_bytes(4, sys.byteorder))]
    channel.sendmsg([serial.to_bytes(8, sys.byteorder)], rights)
    channel.detach()


def _limit(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(what, (value, value))


def _num_tasks() -> int:
    """The number of threads on this machine, an upper bound of this user's."""
    with open("/proc/loadavg") as file:  # noqa: PTH123
        return int(file.read().split()[3].partition("/")[2])
