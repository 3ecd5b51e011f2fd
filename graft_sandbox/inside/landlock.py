"""Landlock: a process restricts itself and its children to the files that it names."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from . import kernel

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
REFER = 1 << 13  # move between folders
TRUNCATE = 1 << 14
RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Version of the interface -> the file rights that exist from that version on."""
OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | 1 << 15
NETWORK = 3  # bind and connect TCP
SCOPES = 3  # abstract Unix sockets and signals stay inside


def version() -> int:
    """The kernel's version of the interface; OSError if there is none."""
    return kernel.syscall("landlock_create_ruleset", None, 0, 1)


def is_available() -> bool:
    try:
        return version() > 0
    except OSError:
        return False


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Restrict this process to reading below `readable` and to all but executing below `writable`.

    PR_SET_NO_NEW_PRIVS must be set before.
    """
    abi = version()
    every = max(rights for since, rights in RIGHTS.items() if since <= abi)
    attributes = struct.pack("=QQQ", every, NETWORK, SCOPES)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    rules = kernel.syscall("landlock_create_ruleset", attributes, size, 0)
    try:
        for path in readable:
            _allow(rules, path, READ_FILE | READ_DIR)
        for path in writable:
            _allow(rules, path, every & ~EXECUTE)
        kernel.syscall("landlock_restrict_self", rules, 0)
    finally:
        os.close(rules)


def hiding_rules(hidden: list[str], readable: Iterable[str], writable: Iterable[str]) -> int:
    """A descriptor for `enforce`: only files below `readable`, without `hidden`, can be read.

    Landlock only adds permissions, so the folders that lead to a hidden one are replaced by their
    entries. Names can still be listed. This takes one rule per entry, so the host does it once, and
    its children enforce the rules.
    """
    refer = REFER if version() >= 2 else 0  # every set of rules refuses it that does not name it
    attributes = struct.pack("=Q", READ_FILE | refer)
    rules = kernel.syscall("landlock_create_ruleset", attributes, len(attributes), 0)
    paths = list(readable)
    while paths:
        path = paths.pop()
        if any(entry.startswith(f"{path}/") for entry in hidden):
            paths += [f"{path}/{name}" for name in os.listdir(path)]  # noqa: PTH208
        elif path not in hidden and not os.path.islink(path):  # noqa: PTH114
            _allow(rules, path, READ_FILE)
    for path in writable:
        _allow(rules, path, READ_FILE | refer)
    return rules


def enforce(rules: int) -> None:
    kernel.syscall("landlock_restrict_self", rules, 0)


def _allow(rules: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= OF_A_FILE
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor))
        kernel.syscall("landlock_add_rule", rules, 1, rule, 0)
    finally:
        os.close(descriptor)
