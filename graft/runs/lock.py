"""Whether a process holds a run's folder, without touching its lock."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from pathlib import Path


def is_held(lock: Path) -> bool:
    """Whether a process holds the flock on this file.

    The lock is looked up and never taken: even a short lock of ours could make a run fail that starts at
    this moment. Linux lists flocks in /proc/locks; where flocks are byte-range
    locks (network file systems, macOS), F_GETLK finds them. A process in another container on the
    same machine is not seen.
    """
    try:
        wanted = lock.stat()
    except OSError:
        return False
    return _is_listed(wanted) or _blocks_ours(lock)


def _is_listed(wanted: os.stat_result) -> bool:
    """`1: FLOCK  ADVISORY  WRITE 30506 fe:00:2179967 0 EOF`: holder, device and file."""
    try:
        listed = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    for fields in map(str.split, listed):
        if len(fields) < 6 or fields[1] != "FLOCK":  # "->" marks a process that waits for the lock
            continue
        major, minor, number = fields[5].split(":")
        if int(number) != wanted.st_ino:
            continue
        if os.makedev(int(major, 16), int(minor, 16)) == wanted.st_dev:
            return True
        if _has_open(fields[4], wanted):  # btrfs and others show two device numbers
            return True
    return False


def _has_open(process: str, wanted: os.stat_result) -> bool:
    try:
        for entry in os.scandir(f"/proc/{process}/fd"):
            if os.path.samestat(entry.stat(), wanted):
                return True
    except OSError:  # another user's process, or one that has just ended
        pass
    return False


def _blocks_ours(lock: Path) -> bool:
    # struct flock: Linux has type and whence in front, macOS behind start, length and process
    form, place = ("qqihh", 3) if sys.platform == "darwin" else ("hhqqi0q", 0)
    request = [0, 0, 0, 0, 0]
    request[place] = fcntl.F_WRLCK
    try:
        with lock.open("rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(form, *request))
    except OSError:
        return False
    return struct.unpack(form, answer)[place] != fcntl.F_UNLCK
