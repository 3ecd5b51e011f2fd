"""The result of one check of a machine or a run: what was checked, the verdict, what to do."""

from __future__ import annotations

from typing import Any, NamedTuple

PASS, WARN, FAIL = "pass", "warn", "fail"

WIDTH = 15
"""Columns of a check's name."""


class Check(NamedTuple):
    """One result, printed as a line or two.

    >>> print(Check("disk", WARN, "1 GiB free", "delete old runs"))
    warn  disk            1 GiB free
                          -> delete old runs
    """

    name: str
    verdict: str
    seen: str
    remedy: str = ""
    data: dict[str, Any] | None = None
    """More detail than a line can show; printed as JSON only."""

    def __str__(self) -> str:
        first, *more = f"{self.verdict}  {self.name:<{WIDTH}} {self.seen}".split("\n")
        below = [*more, *([f"-> {self.remedy}"] if self.remedy else [])]
        return "\n".join([first, *(" " * (WIDTH + 7) + line for line in below)])

    def to_json(self) -> dict[str, Any]:
        found = self._asdict()
        if self.data is None:
            del found["data"]
        return found
