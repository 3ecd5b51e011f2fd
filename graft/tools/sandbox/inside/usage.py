"""The memory and disk of a call, which the kernel does not count per group of processes or files."""

from __future__ import annotations

import os
import resource


def memory_of(roots: list[int]) -> dict[int, int]:
    """Bytes used by each of these processes and its descendants, without the pages of the host."""
    parents: dict[int, int] = {}
    pages: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # ended meanwhile
        parents[int(name)], pages[int(name)] = int(fields[1]), int(fields[21])
    shared = pages.get(os.getpid(), 0)
    totals = dict.fromkeys(roots, 0)
    for pid in parents:
        root = pid
        while root not in totals and root in parents:
            root = parents[root]
        if root in totals:
            totals[root] += max(0, pages[pid] - shared) * resource.getpagesize()
    return totals


def disk_of(folder: str) -> int:
    """Bytes of the files below a folder, without those that cannot be read."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(f"{path}/{name}").st_blocks * 512
            except OSError:
                continue  # removed meanwhile
    return total
