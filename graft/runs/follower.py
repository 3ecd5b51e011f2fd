"""Shows a run on a display while its process trains: `graft watch`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from graft.runs.curves import is_step, numbers
from graft.runs.json_lines import GrowingJsonl
from graft.runs.record import RunRecord, RunStatus
from graft.train.monitor.labels import PHASE_WORDS

if TYPE_CHECKING:
    from graft.train.monitor.display import Display

EVERY = 1.0
"""Seconds between two reads of a run that is followed."""
PAST_STEPS = 10
"""Past steps that plain output begins with; the live table shows `LIVE_STEPS` of them."""
LIVE_STEPS = 2000


class StepClock:
    """A clock that adds up the recorded step times of a run."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Follower:
    """Feeds a display from the files of a run, as the run itself would."""

    def __init__(self, record: RunRecord, display: Display, clock: StepClock) -> None:
        self.record, self.display, self.clock = record, display, clock
        self._metrics = GrowingJsonl(record.path / "metrics.jsonl")
        self._alarms = GrowingJsonl(record.path / "alarms.jsonl")
        self._phase = ""
        self._noted_silence_of = 0.0

    def follow(self, every: float = EVERY, sleep: Callable[[float], None] = time.sleep) -> None:
        """Follow until no process holds the run; returns at once if none does."""
        self._show_past()
        while True:
            status = self.record.status  # read first, so that the last lines are read below
            self._show_new()
            if status is not RunStatus.RUNNING:
                return self._show_end(status)
            self._note_silence()
            sleep(every)

    def _show_past(self) -> None:
        most = LIVE_STEPS if self.display.is_live else PAST_STEPS
        rows = deque((row for row in self._metrics.new() if is_step(row)), maxlen=most)
        for row in rows:
            self._step(row)
        for row in deque(self._alarms.new(), maxlen=PAST_STEPS):
            self._alarm(row)
        if not rows:
            self.display.note(f"{self.record.path}: no step is done yet")

    def _show_new(self) -> None:
        before = self._metrics.rewritten
        rows = self._metrics.new()
        if self._metrics.rewritten != before:
            self._phase = ""
            self.display.note("the run resumed from its last checkpoint")
            rows = iter(deque(rows, maxlen=PAST_STEPS))
        for row in rows:
            if is_step(row):
                self._step(row)
        for row in self._alarms.new():
            self._alarm(row)

    def _step(self, row: dict[str, Any]) -> None:
        if row["phase"] != self._phase:
            self._phase = row["phase"]
            steps = self.record.total_steps(row["phase"], row) or row["step"]
            self.display.phase(PHASE_WORDS[row["phase"]], steps)
        metrics = numbers(row)
        took = metrics.get("step_time", 0.0)
        self.clock.now += took if 0 < took < float("inf") else 0.0
        self.display.update(row["step"], metrics)

    def _alarm(self, row: dict[str, Any]) -> None:
        step = row["step"] if isinstance(row.get("step"), int) else None
        self.display.alarm(str(row.get("text", "")), str(row.get("level", "")), step)

    def _note_silence(self) -> None:
        """Report each period of silence once."""
        silent, last = self.record.silent_for(), self.record.last_activity
        if silent and last != self._noted_silence_of:
            self._noted_silence_of = last
            at = datetime.fromtimestamp(last).strftime("%Y-%m-%d %H:%M:%S")
            self.display.note(
                f"silent since {at} ({ago(silent)}), though its process lives: a long evaluation, a "
                "tool that hangs, or a stopped machine"
            )

    def _show_end(self, status: str) -> None:
        self.display.note(ending(self.record, status))
        if status == "done":
            self.display.table(*self.record.scores, self.record.leakage)


def ending(record: RunRecord, status: str) -> str:
    """The status of a run without a process, and what to do."""
    where = record.path
    last, saved = record.last, record.checkpoint
    reached = "before its first step" if last is None else f"after {last['phase']} {last['step']}"
    if status == "done":
        return f"{where} is done"
    if status == "failed":
        why = f"numbers that were not finite; the batch is in {where / 'failed'}"
        return f"{where} failed {reached}: {record.reason or why}"
    resume = (
        "nothing was saved before that"
        if saved is None
        else f"`graft train` with the same recipe goes on from checkpoint {saved.name}"
    )
    return f"{where} stopped {reached}; {resume}"


def ago(seconds: float) -> str:
    """
    >>> ago(3), ago(200), ago(7200), ago(180000), ago(0.2)
    ('3 s ago', '3 min ago', '2 h ago', '2 days ago', 'now')
    """
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= 2 * length or (length < 60 and seconds >= length):
            return f"{int(seconds // length)} {unit} ago"
    return "now"
