"""A call without a disk of its own asks the host before it opens a file for writing.

The kernel limits the size of each file, but neither their number nor their sum. So every system call that
creates, renames or opens a file for writing waits for the host (a seccomp notification). The host counts
what is there, and lowers the limit of a file until all that can still be written fits the disk:

    disk 64, nothing written            limit 16: 4 files may be opened before the next count
    4 files of 10 each are closed       40 + 16 fit: limit 16, 1 file
    2 of them are still open            20 + 2 * 16, as each may grow, but not + 16: limit 12, 1 file

A host that is late delays a program that writes; nothing that does not fit can be written meanwhile.
"""

from __future__ import annotations

import os
import resource
import time

from . import kernel, usage

AMORTIZED = 16
"""With more files than this, so large a part of them may be opened before the next count."""
SMALLEST = 1 << 16
"""With a smaller limit of a file there is no space left."""
PATIENCE = 1.0
"""Seconds that a request waits for other threads, which may be writing files that are closed already,
before it gets what fits beside them."""
WAITS = {
    "x86_64": {0, 7, 23, 24, 34, 35, 61, 128, 202, 230, 232, 247, 270, 271, 281},
    "aarch64": {22, 63, 72, 73, 95, 98, 101, 115, 124, 137, 260},
}
"""read, select, poll, epoll, sched_yield, nanosleep, futex, pause, sigtimedwait, wait: a thread in one of
these writes nothing."""


class WriteGate:
    """The files of one call, and its requests."""

    def __init__(self, pid: int, folder: str, disk: int, user: int | None) -> None:
        """`user`: the id of the call's process, if it is not the host's own."""
        self.pid = pid
        self.folder = folder
        self.device = os.stat(folder).st_dev  # noqa: PTH116
        self.disk = disk
        self.user = user
        self.largest = disk // usage.FILE_SHARE
        self.waiting: dict[int, tuple[int, float]] = {}
        """Threads that ask -> the request and when it came."""
        self.grants = disk // self.largest
        """Files that may be opened before the next count; a call begins with an empty folder."""
        self.num_admitted = 0
        self.limit = self.largest
        """Of one file, at present."""
        self.highest = self.limit
        """The highest limit since no other thread was writing: a write keeps the limit it began with."""
        self.bounds: dict[tuple[int, int], int] = {}
        """Open files -> the highest limit since they were opened, or since nobody was writing."""

    def ask(self, thread: int, request: int) -> None:
        self.waiting[thread] = request, time.monotonic()

    def decide(self) -> list[tuple[int, bool]]:
        """The requests that are decided now, and whether they are admitted. Others wait on."""
        decided: list[tuple[int, bool]] = []
        for thread, (request, since) in list(self.waiting.items()):
            is_patient = time.monotonic() - since < PATIENCE
            if not self.grants and not self._count(is_patient=is_patient):
                break
            del self.waiting[thread]
            is_admitted = self.grants > 0
            self.grants -= is_admitted
            self.num_admitted += is_admitted
            decided.append((request, is_admitted))
        return decided

    def _count(self, *, is_patient: bool) -> bool:
        """Count what is there, set the limit of a file and the number that may be opened, if any. False:
        there may be more when other threads have written."""
        # in this order: without a grant no thread can open another file meanwhile
        others = self._others()
        num_writing = min(list(others.values()).count(None), self.num_admitted)
        sizes = self._writable_files()
        used, count = usage.files_below(self.folder)
        if num_writing:  # a thread may have moved a folder out of the way of the count
            used = max(used, usage.files_below(self.folder)[0])
        used += usage.num_mapped_deleted(self.pid, self.folder) * self.largest
        used += sum(size for size, has_name in sizes.values() if not has_name)
        used += num_writing * self.highest
        before = {file: self.bounds.get(file, self.limit) for file in sizes}
        bounds = before if num_writing else dict.fromkeys(sizes, 0)
        limit, grants = self._fit(used, count, [(sizes[file][0], bounds[file]) for file in sizes])
        if is_patient and num_writing and limit < self.largest // 4:
            return False
        if grants:
            self._set(limit)
            if sizes and not num_writing and self._others() != others:
                # a thread ran before the limit was set, and may have begun to write
                bounds, num_writing, grants = before, 1, 0
            self.bounds = {file: max(bound, limit) for file, bound in bounds.items()}
            self.highest = max(self.highest, limit) if num_writing else limit
        self.grants = grants
        return grants > 0 or not (is_patient and num_writing)

    def _fit(self, used: int, count: int, files: list[tuple[int, int]]) -> tuple[int, int]:
        """The limit of a file and how many may be opened, so that all of them fit; 0, 0: none does.

        `files`: the size of each open file, and what it may grow to under any limit.
        """
        possible = usage.MAX_FILES - count
        grants = min(max(1, count // AMORTIZED), possible)
        limit = self.largest if possible > 0 else 0
        while limit >= SMALLEST:
            growth = sum(max(0, bound - size, limit - size) for size, bound in files)
            left = self.disk - used - growth
            if grants * limit <= left:
                return limit, max(grants, min(left // limit, possible))
            limit = limit * 3 // 4
        return 0, 0

    def _set(self, limit: int) -> None:
        if limit != self.limit:
            with kernel.acting_as(self.user):
                hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)[1]
                resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (limit, hard))
            self.limit = limit

    def _others(self) -> dict[int, bytes | None]:
        """Threads that do not ask -> how often they have run, if they wait for something. None: one may
        be in a write, or on its way into an admitted call."""
        folder = f"/proc/{self.pid}/task"
        threads = [int(name) for name in os.listdir(folder)]  # noqa: PTH208
        found: dict[int, bytes | None] = {}
        for thread in threads:
            if thread in self.waiting:
                continue
            found[thread] = None
            try:
                with open(f"{folder}/{thread}/syscall", "rb") as file:  # noqa: PTH123
                    number = file.read().split(None, 1)[0]
                if number.isdigit() and int(number) in WAITS[kernel.machine]:
                    with open(f"{folder}/{thread}/status", "rb") as file:  # noqa: PTH123
                        found[thread] = file.read().rpartition(b"\nvoluntary_ctxt_switches")[2]
            except OSError:
                continue  # ended meanwhile, or not to be seen
        return found

    def _writable_files(self) -> dict[tuple[int, int], tuple[int, bool]]:
        """Files that are open for writing -> their size, and whether they have a name. One without a
        name that is only read is among them."""
        found: dict[tuple[int, int], tuple[int, bool]] = {}
        for name, seen in usage.open_files(self.pid, self.device):
            try:
                with open(f"/proc/{self.pid}/fdinfo/{name}", "rb") as lines:  # noqa: PTH123
                    flags = next(line.split()[1] for line in lines if line.startswith(b"flags:"))
            except FileNotFoundError:
                continue  # closed meanwhile
            if int(flags, 8) & os.O_ACCMODE or not seen.st_nlink:
                found[seen.st_dev, seen.st_ino] = usage.size(seen), seen.st_nlink > 0
        return found
