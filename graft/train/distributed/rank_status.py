"""What one process knows of the other ranks, and how it prints that.

    rank 1 is sampling, step 12, since 0:42
    ranks 0, 2-3 are waiting for the rewards since 0:31

Each rank reports every few seconds. For ranks on the same machine /proc also shows whether a process has
ended or was stopped by a signal.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import getpid
from pathlib import Path
from typing import Any, NamedTuple

from graft.deadlines import clock

GONE, ABSENT, BUSY, WAITING = range(4)
"""Order in which ranks are listed: those that the others wait for come first."""


class RankStatus(NamedTuple):
    """What one rank does; `text` follows "rank 1 is"."""

    order: int
    text: str
    age: float | None = None
    waits_for: str = ""


@dataclass(slots=True)
class RankPeer:
    """What is known of one rank."""

    host: str = ""
    pid: int = 0
    pid_namespace: str = ""
    """Where its pid is valid; empty: unknown."""
    report: dict[str, Any] = field(default_factory=dict)
    heard: float = 0.0
    """When its report last changed, by our clock: clocks of machines differ."""

    @classmethod
    def own(cls) -> RankPeer:
        return cls(socket.gethostname(), getpid(), _pid_namespace())

    @property
    def last(self) -> str:
        """The activity of its latest report."""
        if self.report.get("is_together"):
            return f"waiting for {self.report['waits_for']}"
        return self.report.get("phase", "starting")

    def life(self) -> str:
        """gone, stopped or alive; unknown on another machine."""
        if not self.pid_namespace or self.pid_namespace != _pid_namespace():
            return "unknown"
        try:
            # the fields behind the name, which may contain any character
            fields = Path(f"/proc/{self.pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        except OSError:
            return "gone"
        return {"Z": "gone", "X": "gone", "T": "stopped"}.get(fields[0], "alive")

    def status(self, now: float, patience: float) -> RankStatus:
        """From its process and its latest report; `now` is when the store last answered."""
        life, silent = self.life(), now - self.heard
        where = f"(pid {self.pid} on {self.host}); it was last {self.last}"
        if life == "gone":
            return RankStatus(GONE, f"gone {where}")
        if life == "stopped":
            return RankStatus(ABSENT, f"stopped by a signal {where}")
        if silent > patience:
            return RankStatus(GONE if life == "unknown" else ABSENT, f"silent {where},", silent)
        return reported_status(self.report, time.monotonic() - self.heard)


NOT_STARTED = RankStatus(ABSENT, "not started yet")


def reported_status(report: Mapping[str, Any], age: float) -> RankStatus:
    """From a report that is `age` seconds old."""
    what, waits = report.get("waits_for", ""), report.get("waits", 0.0) + age
    if report.get("is_together"):
        return RankStatus(WAITING, f"waiting for {what}", waits, what)
    within = f" (waiting {clock(waits)} for {what})" if what else ""
    phase = report.get("phase", "starting")
    return RankStatus(BUSY, f"{phase}{within},", report.get("for", 0.0) + age)


def status_table(statuses: Iterable[tuple[int, RankStatus]]) -> dict[str, str]:
    """Ranks that do the same in one line: {"ranks 0, 2-3": "are waiting for ... since 0:31"}."""
    groups: dict[str, list[tuple[int, RankStatus]]] = {}
    for rank, status in sorted(statuses, key=lambda item: item[1].order):
        groups.setdefault(status.text, []).append((rank, status))
    table: dict[str, str] = {}
    for text, members in groups.items():
        ages = [status.age for _, status in members if status.age is not None]
        since = f" since {clock(max(ages))}" if ages else ""
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


def _pid_namespace() -> str:
    """Two processes with the same text see each other's pids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
