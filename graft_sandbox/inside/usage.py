"""The memory, disk and threads that a running call uses, as far as the kernel does not limit them.

The kernel limits the address space of one process, the size of one file and, with namespaces, the
disk. What it does not add up is added up here: several processes, buffers of sockets and pipes, shared
memory that no process has touched lately, and without namespaces the files.
"""

from __future__ import annotations

import contextlib
import os
import resource
import stat
from collections.abc import Iterator

PAGE = resource.getpagesize()
PIPE_BUFFER = 1 << 16
FEW_FILES = 16
"""Open files of a process that are not looked at: their buffers are small."""
MAX_FILES = 4096
"""Files and folders in a scratch folder; with namespaces the kernel has the same limit."""
MAX_DEPTH = 100
FILE_SHARE = 4
"""Without namespaces one file may have 1/4 of the disk: a file that was deleted, closed and is only
mapped has a size that cannot be seen, and counts as the largest one."""
KILLED_AT = 2
"""Without namespaces a call is killed when it has 1/2 of the disk: it can write on until it is counted."""
UNKNOWN = 1 << 60


class Process:
    """A line of the process table."""

    __slots__ = ("heap", "num_threads", "parent", "pid", "size", "ticks")

    def __init__(self, pid: int) -> None:
        """OSError if it has ended."""
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            fields = file.read().rpartition(b")")[2].split()
        self.pid = pid
        self.parent = int(fields[1])
        self.ticks = int(fields[11]) + int(fields[12])
        self.num_threads = int(fields[17])
        self.size = int(fields[20])
        self.heap = int(fields[44])
        """Where its heap begins, which differs after it has started a program (exec)."""

    def base(self, loaded: int) -> int:
        """The part of its address space that it has inherited from the host."""
        return loaded if self.heap == OWN_HEAP else 0

    def excess(self, loaded: int) -> int:
        """Address space beyond the host's."""
        return max(0, self.size - self.base(loaded))

    def measure(self) -> int:
        """Bytes of memory of its own: neither files nor shared memory."""
        with open(f"/proc/{self.pid}/statm", "rb") as file:  # noqa: PTH123
            _, resident, shared = map(int, file.read().split()[:3])
        return (resident - shared) * PAGE


OWN_HEAP = Process(os.getpid()).heap


def process_table() -> dict[int, Process]:
    """Every process of this namespace: the host, its calls and what they started."""
    table: dict[int, Process] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            try:
                table[int(name)] = Process(int(name))
            except OSError:
                continue  # ended meanwhile
    return table


def by_root(table: dict[int, Process], roots: list[int]) -> dict[int, list[Process]]:
    """The processes below each of these, themselves included."""
    trees: dict[int, list[Process]] = {root: [] for root in roots}
    for process in table.values():
        root = process.pid
        while root not in trees and root in table:
            root = table[root].parent
        if root in trees:
            trees[root].append(process)
    return trees


def leader(thread: int) -> int:
    """The process of a thread."""
    with open(f"/proc/{thread}/status", "rb") as lines:  # noqa: PTH123
        return next(int(line.split()[1]) for line in lines if line.startswith(b"Tgid:"))


def alone(pid: int) -> list[Process]:
    """This process, without those below it; none if it has ended."""
    try:
        return [Process(pid)]
    except OSError:
        return []


class MemoryMeter:
    """Adds up the memory of a call."""

    def __init__(self, loaded: int) -> None:
        """`loaded`: the address space of the host, which each process has inherited."""
        self.loaded = loaded
        self.inherited = Process(os.getpid()).measure()
        self.socket_buffer = _socket_buffer()

    def is_above(self, processes: list[Process], limit: int) -> bool:
        """Whether the processes together have more than `limit` bytes."""
        buffers = sum(self._buffers(process.pid) for process in processes)
        # an upper bound that costs nothing: address space includes what cannot be seen
        if sum(process.excess(self.loaded) for process in processes) + buffers <= limit:
            return False
        total, shared = buffers, dict[bytes, int]()
        for process in processes:
            try:
                inherited = self.inherited if process.heap == OWN_HEAP else 0
                total += max(0, process.measure() - inherited)
                if len(processes) > 1 or buffers:
                    for inode, size in shared_memory(process.pid).items():
                        shared[inode] = max(size, shared.get(inode, 0))
            except OSError:
                continue  # ended meanwhile
        return total + sum(shared.values()) > limit

    def _buffers(self, pid: int) -> int:
        """The largest size that the kernel's buffers of its sockets and pipes can have."""
        folder = f"/proc/{pid}/fd"
        try:
            names = os.listdir(folder)  # noqa: PTH208
            if len(names) <= FEW_FILES:
                return 0
            total = 0
            for name in names:
                target = os.readlink(f"{folder}/{name}")  # noqa: PTH115
                if target.startswith("socket:"):
                    total += self.socket_buffer
                elif target.startswith("pipe:"):
                    total += PIPE_BUFFER // 2  # both ends are counted
        except OSError:
            return 0  # the process or a file of it is gone
        return total


def shared_memory(pid: int) -> dict[bytes, int]:
    """Shared memory without a file: its identity -> bytes. Pages of it exist even if no process has
    them in its tables (MADV_DONTNEED), so the size of the mapping is what counts."""
    sizes: dict[bytes, int] = {}
    with open(f"/proc/{pid}/maps", "rb") as lines:  # noqa: PTH123
        for line in lines:
            fields = line.split(None, 5)
            if fields[1][3:] == b"s" and len(fields) > 5 and fields[5].startswith(b"/dev/zero"):
                start, _, end = fields[0].partition(b"-")
                inode = fields[4]
                sizes[inode] = sizes.get(inode, 0) + int(end, 16) - int(start, 16)
    return sizes


def disk(pid: int, folder: str, limit: int) -> int:
    """Bytes of the files below a folder and of deleted ones that the process still holds. UNKNOWN for
    a tree that cannot be counted."""
    total, _ = files_below(folder)
    try:
        device = os.stat(folder).st_dev  # noqa: PTH116
        total += held_files(pid, device) + num_mapped_deleted(pid, folder) * (limit // FILE_SHARE)
    except OSError:  # it has ended, or has not become its own user yet
        return total
    return total


def files_below(folder: str) -> tuple[int, int]:
    """Bytes and number of the files and folders below a folder. UNKNOWN for a tree that cannot be
    counted: too many files, too deep, or closed to this user."""
    total = count = 0
    folders = [(folder, 0)]
    while folders:
        path, depth = folders.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    count += 1
                    if count > MAX_FILES or depth > MAX_DEPTH:
                        return UNKNOWN, count
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        if entry.is_dir(follow_symlinks=False):
                            folders.append((entry.path, depth + 1))
                        total += size(entry.stat(follow_symlinks=False))
        except FileNotFoundError:
            continue
        except OSError:
            return UNKNOWN, count
    return total, count


def size(file: os.stat_result) -> int:
    """Bytes that a file has on the disk, or will have when its holes are filled."""
    return max(file.st_size, file.st_blocks * 512)


def open_files(pid: int, device: int) -> Iterator[tuple[str, os.stat_result]]:
    """The files on this device that a process has open, by descriptor. OSError if it has ended."""
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):  # noqa: PTH208
        try:
            found = os.stat(f"{folder}/{name}")  # noqa: PTH116
        except FileNotFoundError:
            continue  # closed meanwhile
        if stat.S_ISREG(found.st_mode) and found.st_dev == device:
            yield name, found


def held_files(pid: int, device: int) -> int:
    """Bytes of the files that a process has open and that have no name any more."""
    held = {found.st_ino: size(found) for _, found in open_files(pid, device) if not found.st_nlink}
    return sum(held.values())


def num_mapped_deleted(pid: int, folder: str) -> int:
    """Deleted files of this folder that the process has mapped into memory."""
    prefix, inodes = os.fsencode(folder), set[bytes]()
    with open(f"/proc/{pid}/maps", "rb") as lines:  # noqa: PTH123
        for line in lines:
            if line.endswith(b" (deleted)\n") and prefix in line:
                inodes.add(line.split(None, 5)[4])
    return len(inodes)


def _socket_buffer() -> int:
    try:
        with open("/proc/sys/net/core/wmem_default") as file:  # noqa: PTH123
            return int(file.read())
    except (OSError, ValueError):  # not in this network namespace
        return 212_992
