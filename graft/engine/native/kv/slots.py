"""Numbered places of a pool, with reference counts; place 0 is never given away."""

from __future__ import annotations


class Slots:
    """take(2) -> [1, 2]; share([1]) -> 1 has two references; release([1, 2]) -> 2 is free, 1 is not."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total, 0, -1))  # pop() takes low numbers first
        self._ref_counts = [0] * (total + 1)

    @property
    def free(self) -> int:
        return len(self._free)

    def ref_count(self, slot: int) -> int:
        return self._ref_counts[slot]

    def take(self, count: int) -> list[int]:
        """`count` new slots with one reference each; the caller has checked `free`."""
        taken = [self._free.pop() for _ in range(count)]
        for slot in taken:
            self._ref_counts[slot] = 1
        return taken

    def share(self, slots: list[int]) -> None:
        for slot in slots:
            self._ref_counts[slot] += 1

    def release(self, slots: list[int]) -> None:
        for slot in slots:
            self._ref_counts[slot] -= 1
            if self._ref_counts[slot] == 0:
                self._free.append(slot)
