"""The host's own namespaces and file tree, which holds little more than Python.

/                tmpfs, read-only
/usr/lib ...     the given paths, bound read-only under their own names
/dev             null, zero, full, random, urandom
/proc            the processes of this namespace; hidden from children
/scratch         where each child mounts its own disk; /tmp is a link to it where possible
"""

from __future__ import annotations

import os

from . import kernel

DEVICES = ("null", "zero", "full", "random", "urandom")
SCRATCH = "/scratch"
EMPTY = "/empty"
STAND_IN = __file__.replace("rootfs", "hidden")

_SITE = "/tmp"  # any folder: the new root is mounted over it for a moment


def is_privileged() -> bool:
    """True for a root user that may create namespaces and become other users.

    Root in a container often may not, and is then treated as an ordinary user.
    """
    return os.geteuid() == 0 and kernel.has_capability(kernel.CAP_SYS_ADMIN) and num_users() > 30000


def num_users() -> int:
    """The number of user ids in this user namespace, counted from 0."""
    with open("/proc/self/uid_map") as lines:  # noqa: PTH123
        ranges = [tuple(map(int, line.split())) for line in lines]
    return next((count for inside, _, count in ranges if inside == 0), 0)


def enter_namespaces(is_root: bool) -> None:
    """New namespaces for this process; the pid namespace applies to its next children."""
    kinds = kernel.NEWNS | kernel.NEWPID | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS
    if is_root:
        kernel.unshare(kinds)
    else:
        kernel.unshare_as(0, 0, kinds)
    kernel.mount(b"none", b"/", b"", kernel.MS_REC | kernel.MS_PRIVATE)


def build_root(readable: list[str], links: dict[str, str], hidden: list[str]) -> None:
    """Build the file tree and make it the root. Must run as the first process of the pid namespace."""
    devices = [f"/dev/{name}" for name in DEVICES]
    with open(STAND_IN) as file:  # noqa: PTH123
        stand_in = file.read()
    # opened first: the new root may cover some of them
    sources = {path: os.open(path, os.O_PATH) for path in [*readable, *devices]}
    kernel.mount(b"tmpfs", _SITE.encode(), b"tmpfs", kernel.MS_NOSUID, b"size=4m,mode=0755")
    for path, source in sources.items():
        target = _SITE + path
        if os.path.isdir(f"/proc/self/fd/{source}"):  # noqa: PTH112
            os.makedirs(target, exist_ok=True)  # noqa: PTH103
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120
            _write(target, "")
        flags = kernel.MS_BIND | kernel.MS_REC
        kernel.mount(b"/proc/self/fd/%d" % source, os.fsencode(target), b"", flags)
        if path not in devices:
            kernel.make_read_only(target)
        os.close(source)
    for path in hidden:
        target = os.fsencode(_SITE + path)
        if os.path.isdir(target):  # noqa: PTH112
            flags = kernel.MS_NOSUID | kernel.MS_NODEV
            kernel.mount(b"tmpfs", target, b"tmpfs", flags, b"size=64k,mode=0755")
            _write(f"{_SITE}{path}/__init__.py", stand_in)
            kernel.mount(b"none", target, b"", flags | kernel.MS_REMOUNT | kernel.MS_RDONLY)
        else:
            kernel.mount(f"{_SITE}/dev/null".encode(), target, b"", kernel.MS_BIND)
    for path, target in links.items():
        os.makedirs(_SITE + os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
        os.symlink(target, _SITE + path)  # noqa: PTH211
    for folder in (SCRATCH, EMPTY, "/proc"):
        os.mkdir(_SITE + folder)  # noqa: PTH102
    kernel.mount(b"proc", f"{_SITE}/proc".encode(), b"proc", kernel.MS_NOSUID | kernel.MS_NODEV)
    kernel.pivot_root(_SITE)
    kernel.mount(b"none", b"/", b"", kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:  # noqa: PTH123
        file.write(text)
