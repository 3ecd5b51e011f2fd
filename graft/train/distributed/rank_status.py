"""What each rank does, and how that is printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from graft.deadlines import clock


class RankStatus(NamedTuple):
    """What one rank does; `text` follows "rank 1 is"."""

    text: str
    age: float | None = None
    """Seconds since this began."""
    collective: str = ""
    """The collective operation in which it waits for the others."""


class RankReport(NamedTuple):
    """The latest report of one rank."""

    host: str
    pid: int
    number: int
    """Increases with each report of a rank."""
    status: RankStatus
    read_at: float
    """By the reader's clock: clocks of machines differ."""


def status_table(statuses: Iterable[tuple[int, RankStatus]]) -> dict[str, str]:
    """Ranks that do the same in one line, {"ranks 0, 2-3": "are waiting for ..., since 0:31"}; those
    that the others wait for come first."""
    groups: dict[str, list[tuple[int, RankStatus]]] = {}
    for rank, status in sorted(statuses, key=lambda item: bool(item[1].collective)):
        groups.setdefault(status.text, []).append((rank, status))
    table: dict[str, str] = {}
    for text, members in groups.items():
        ages = [status.age for _, status in members if status.age is not None]
        since = f", since {clock(max(ages))}" if ages else ""
        verb = "is" if len(members) == 1 else "are"
        table[name_ranks([rank for rank, _ in members])] = f"{verb} {text}{since}"
    return table


def name_ranks(ranks: Sequence[int]) -> str:
    """
    >>> name_ranks([1]), name_ranks([0, 1, 2, 5])
    ('rank 1', 'ranks 0-2, 5')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    listed = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
