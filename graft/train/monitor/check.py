"""One finding about a machine or a run: what was looked at, how it is, and what to do about it."""

from __future__ import annotations

from typing import Any, NamedTuple

PASS, WARN, FAIL = "pass", "warn", "fail"

WIDTH = 15
"""Columns of a check's name."""


class Check(NamedTuple):
    """A line of the doctor's.

    >>> print(Check("disk", WARN, "1 GiB free", "make room"))
    warn  disk       1 GiB free
                     -> make room
    """

    name: str
    verdict: str
    seen: str
    remedy: str = ""
    data: dict[str, Any] | None = None
    """What was seen in more detail than a line can show; for JSON alone."""

    def __str__(self) -> str:
        first, *more = f"{self.verdict}  {self.name:<{WIDTH}} {self.seen}".split("\n")
        below = [*more, *([f"-> {self.remedy}"] if self.remedy else [])]
        return "\n".join([first, *(" " * (WIDTH + 7) + line for line in below)])

    def to_json(self) -> dict[str, Any]:
        found = self._asdict()
        if self.data is None:
            del found["data"]
        return found
