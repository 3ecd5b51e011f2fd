"""The Linux system calls that Python's `os` does not offer, each raising OSError when refused."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
from collections.abc import Iterator

NEWNS = 0x0002_0000
NEWUTS = 0x0400_0000
NEWIPC = 0x0800_0000
NEWUSER = 0x1000_0000
NEWPID = 0x2000_0000
NEWNET = 0x4000_0000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
PR_GET_TID_ADDRESS = 40

CLONE_CHILD_CLEARTID = 0x0020_0000
CLONE_CHILD_SETTID = 0x0100_0000
CLONE_INTO_CGROUP = 0x2_0000_0000
SIGCHLD = 17

NEW_LISTENER = 8

CAP_DAC_READ_SEARCH = 2
CAP_SYS_PTRACE = 19
CAP_SYS_ADMIN = 21

machine = os.uname().machine
_NUMBERS = {  # of calls that glibc has no function for
    "x86_64": {
        "pivot_root": 155,
        "capget": 125,
        "capset": 126,
        "seccomp": 317,
        "clone": 56,
        "vfork": 58,
    },
    "aarch64": {"pivot_root": 41, "capget": 90, "capset": 91, "seccomp": 277, "clone": 220},
}
NUMBERS = _NUMBERS.get(machine, {}) | {  # the same on every architecture
    "clone3": 435,
    "mount_setattr": 442,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}
AT_FDCWD = -100
AT_RECURSIVE = 0x8000

_libc = ctypes.CDLL(None, use_errno=True)
# looked up once, in the host: in a child the lookup would cost more than the calls
_mount, _prctl, _setns, _syscall, _umount2, _unshare, _setfsuid, _setfsgid = (
    _libc[name]
    for name in (
        "mount", "prctl", "setns", "syscall", "umount2", "unshare", "setfsuid", "setfsgid",
    )
)  # fmt: skip


_mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]
_prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
_syscall.restype = ctypes.c_long
# keeps Python's lock, which a child of a call without it could never take
_syscall_with_lock = ctypes.PyDLL(None, use_errno=True)["syscall"]
_syscall_with_lock.restype = ctypes.c_long


def _checked(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(name: str, *arguments: object) -> int:
    """A call by its number. Whole numbers go as C longs: varargs would cut them to 32 bits."""
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(name, _syscall(NUMBERS[name], *wide))


def fork_into(group: int) -> int:
    """Fork as os.fork does, but start the child in the control group whose folder is open as `group`.

    To move a process costs the kernel a wait of milliseconds. This process may have only one thread.
    """
    thread, flags = _thread_id_address(), CLONE_INTO_CGROUP
    if thread:
        flags |= CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID  # as the C library's own fork
    arguments = (ctypes.c_uint64 * 11)(flags, 0, thread, 0, SIGCHLD, 0, 0, 0, 0, 0, group)
    python, size = ctypes.pythonapi, ctypes.c_long(ctypes.sizeof(arguments))
    python.PyOS_BeforeFork()
    pid = _syscall_with_lock(NUMBERS["clone3"], arguments, size)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return _checked("clone3", pid)


def _thread_id_address() -> int:
    """The address of this thread's id in the C library, which differs in a child; 0 if it is not there."""
    address = ctypes.c_uint64()
    if _prctl(PR_GET_TID_ADDRESS, ctypes.addressof(address), 0, 0, 0) < 0 or not address.value:
        return 0
    is_id = ctypes.c_int.from_address(address.value).value == os.getpid()
    return address.value if is_id else 0  # musl has a lock there


def unshare(flags: int) -> None:
    _checked("unshare", _unshare(flags))


def unshare_as(user: int, group: int, flags: int) -> None:
    """The same without privileges: in a new user namespace, where this user and group have these numbers."""
    maps = {
        "setgroups": "deny",
        "uid_map": f"{user} {os.geteuid()} 1",
        "gid_map": f"{group} {os.getegid()} 1",
    }
    unshare(flags | NEWUSER)
    for name, text in maps.items():
        with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123 (pathlib is slow to import)
            file.write(text)


def setns(descriptor: int, kind: int) -> None:
    _checked("setns", _setns(descriptor, kind))


def mount(
    source: bytes, target: bytes, kind: bytes = b"", flags: int = 0, data: bytes = b""
) -> None:
    _checked("mount", _mount(source, target, kind or None, flags, data or None))


def make_read_only(target: str) -> None:
    """The mount and those below it: read-only, no set-user-id programs."""

    class Attributes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]

    wanted = Attributes(MS_RDONLY | MS_NOSUID, 0, 0, 0)  # MOUNT_ATTR_ has the same two values
    size = ctypes.sizeof(wanted)
    try:
        syscall(
            "mount_setattr", AT_FDCWD, target.encode(), AT_RECURSIVE, ctypes.byref(wanted), size
        )
    except OSError:  # Linux before 5.12: one mount at a time, keeping the flags it was given
        kept = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | 8 | 1024 | 2048)
        mount(b"none", target.encode(), b"", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | kept)


def pivot_root(new_root: str) -> None:
    """Make `new_root` the root of this mount namespace and let go of the old one."""
    os.chdir(new_root)
    syscall("pivot_root", b".", b".")
    _checked("umount", _umount2(b".", MNT_DETACH))
    os.chdir("/")


def look_as(user: int) -> None:
    """Use this user and group for files and for looking into processes."""
    _setfsgid(user)
    _setfsuid(user)


def prctl(option: int, value: int = 0) -> None:
    _checked("prctl", _prctl(option, value, 0, 0, 0))


class Filter(ctypes.Structure):
    """A system-call filter as the kernel takes it."""

    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def install_filter(code: bytes) -> None:
    """Install a filter in this process and its future children. It cannot be removed."""
    filled = Filter(len(code) // 8, code)
    _checked("seccomp", _prctl(PR_SET_SECCOMP, 2, ctypes.addressof(filled), 0, 0))


def install_filter_and_listen(code: bytes) -> int:
    """Install a filter; calls for which it says so wait for an answer through the descriptor."""
    filled = Filter(len(code) // 8, code)
    return syscall("seccomp", 1, NEW_LISTENER, ctypes.byref(filled))


NOTIFICATION, RESPONSE = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
RECEIVE, SEND = 0xC0502100, 0xC0182101  # ioctls of a listener
CONTINUE = 1


def receive(listener: int) -> tuple[int, int, int, int]:
    """The identity of a call that waits, its thread, its number and its first argument. OSError if
    the thread has ended meanwhile."""
    buffer = bytearray(NOTIFICATION.size)
    fcntl.ioctl(listener, RECEIVE, buffer)
    request, thread, _, number, _, _, first, *_ = NOTIFICATION.unpack(buffer)
    return request, thread, number, first


def answer(listener: int, request: int, refusal: int) -> None:
    """Let the call continue, or fail with this error number. OSError if its thread has ended."""
    response = RESPONSE.pack(request, 0, -refusal, 0 if refusal else CONTINUE)
    fcntl.ioctl(listener, SEND, response)


@contextlib.contextmanager
def acting_as(user: int | None) -> Iterator[None]:
    """Be this user, with root's rights; None: no change. To set limits of another user's process needs
    a privilege that root may not have."""
    if user is not None:
        os.setresgid(user, -1, -1)
        os.setresuid(user, -1, -1)
    try:
        yield
    finally:
        if user is not None:
            os.setresuid(0, -1, -1)
            os.setresgid(0, -1, -1)


_OWN_PROCESS = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of the interface
_NO_CAPABILITIES = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; again for 32 on


def drop_capabilities() -> None:
    """Give up every capability, for good."""
    syscall("capset", _OWN_PROCESS, _NO_CAPABILITIES)


def clear_inheritable_capabilities() -> None:
    sets = (ctypes.c_uint32 * 6)()
    syscall("capget", _OWN_PROCESS, sets)
    sets[2] = sets[5] = 0
    syscall("capset", _OWN_PROCESS, sets)


def keep_capability(number: int) -> None:
    """Give up every capability but one below 32, for good; a container's root may not have that one."""
    held = (ctypes.c_uint32 * 6)()
    syscall("capget", _OWN_PROCESS, held)
    kept = held[1] & 1 << number
    syscall("capset", _OWN_PROCESS, (ctypes.c_uint32 * 6)(kept, kept))


def has_capability(number: int) -> bool:
    with open("/proc/self/status") as status:  # noqa: PTH123 (pathlib is slow to import)
        line = next(line for line in status if line.startswith("CapEff:"))
    return bool(int(line.split()[1], 16) >> number & 1)
