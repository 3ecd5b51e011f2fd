"""`graft runs` lists the runs in a folder; `graft watch RUN` follows one while it trains.

$ graft runs
run         status   step             now           held out    settings   active      size
quickstart  running  reinforce 12/60  reward 0.500  0.310 -> ?  lr 0.0002  3 s ago     18 MB
first-try   stopped  warm-up 60/400   loss 1.636    ? -> ?      lr 0.002   2 days ago  12 MB
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graft.commands.options import AsJson, Run

if TYPE_CHECKING:
    from graft.runs import RunRecord
    from graft.train.monitor.display import Display

EVERY = 1.0
"""Seconds between two reads of a run that is followed."""
SHOWN_BEFORE = 10
"""Past steps that plain output begins with; the live table shows `REMEMBERED`."""
REMEMBERED = 2000


def runs(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder of the runs.")] = "runs",
    as_json: AsJson = False,
) -> None:
    """List runs: status, progress, scores, and the settings in which they differ."""
    from graft.config import ConfigError
    from graft.runs import RunRecord, find_runs
    from graft.runs.settings import differing, in_short

    if folder != "runs" and not Path(folder).is_dir():
        raise ConfigError(f"there is no folder '{folder}'; give the one that holds your runs")
    found = [RunRecord(path) for path in find_runs(Path(folder))]
    found.sort(key=lambda record: record.last_activity, reverse=True)
    now = time.time()
    listed = [state_of(record, now) for record in found]
    for record, state in zip(found, listed, strict=True):
        if record.path != Path(folder):
            state["name"] = str(record.path.relative_to(folder))
    configs = [record.config for record in found]
    if as_json:
        answer = {"folder": folder, "differing": list(differing(configs)), "runs": listed}
        typer.echo(json.dumps(answer))
    elif listed:
        typer.echo("\n".join(table(listed, in_short(configs))))
    else:
        typer.echo(f"no runs in {folder}/; `graft train quickstart` makes one in a minute")


def watch(run: Run, as_json: AsJson = False) -> None:
    """Follow a run until it ends: a live table in a terminal, a line per step elsewhere."""
    from graft.runs import find_run
    from graft.train.monitor.display import Display

    record = find_run(run)
    clock = RunSpeed()
    with Display(0, json=as_json, clock=clock) as display:
        Follower(record, display, clock).follow()
    if as_json:
        typer.echo(json.dumps(state_of(record, time.time())))


class RunSpeed:
    """A clock that adds up the recorded step times of a run."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Follower:
    """Feeds a display from the files of a run, as the run itself would."""

    def __init__(self, record: RunRecord, display: Display, clock: RunSpeed) -> None:
        from graft.runs import GrowingJsonl

        self.record, self.display, self.clock = record, display, clock
        self._metrics = GrowingJsonl(record.path / "metrics.jsonl")
        self._alarms = GrowingJsonl(record.path / "alarms.jsonl")
        self._phase = ""
        self._noted_silence_of = 0.0

    def follow(self, every: float = EVERY, sleep: Callable[[float], None] = time.sleep) -> None:
        """Follow until no process holds the run; returns at once if none does."""
        from graft.runs import RunStatus

        self._show_past()
        while True:
            status = self.record.status  # read first, so that the last lines are read below
            self._show_new()
            if status is not RunStatus.RUNNING:
                return self._show_end(status)
            self._note_silence()
            sleep(every)

    def _show_past(self) -> None:
        from graft.runs import is_step

        most = REMEMBERED if self.display.is_live else SHOWN_BEFORE
        rows = deque((row for row in self._metrics.new() if is_step(row)), maxlen=most)
        for row in rows:
            self._step(row)
        for row in deque(self._alarms.new(), maxlen=SHOWN_BEFORE):
            self._alarm(row)
        if not rows:
            self.display.note(f"{self.record.path}: no step is done yet")

    def _show_new(self) -> None:
        from graft.runs import is_step

        before = self._metrics.rewritten
        rows = self._metrics.new()
        if self._metrics.rewritten != before:
            self._phase = ""
            self.display.note("the run resumed from its last checkpoint")
            rows = iter(deque(rows, maxlen=SHOWN_BEFORE))
        for row in rows:
            if is_step(row):
                self._step(row)
        for row in self._alarms.new():
            self._alarm(row)

    def _step(self, row: dict[str, Any]) -> None:
        from graft.runs import PHASE_WORDS, numbers

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
            self.display.table(*self.record.scores)


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


def state_of(record: RunRecord, now: float) -> dict[str, Any]:
    """One run as plain values; unknown ones are None."""
    from graft.runs import RunStatus, numbers
    from graft.runs.settings import flat

    last, status, saved = record.last, record.status, record.checkpoint
    values = numbers(last or {})
    before, after = record.scores
    active = record.last_activity
    is_running = status is RunStatus.RUNNING
    return {
        "name": record.name,
        "path": str(record.path),
        "status": str(status),
        "phase": None if last is None else last["phase"],
        "step": None if last is None else last["step"],
        "steps": None if last is None else record.total_steps(last["phase"], last),
        "reward": _finite(values.get("reward")),
        "loss": _finite(values.get("loss")),
        "before": {name: _finite(value) for name, value in before.items()},
        "after": {name: _finite(value) for name, value in after.items()},
        "settings": {name: _plain(value) for name, value in flat(record.config).items()},
        "alarms": len(record.alarms),
        "checkpoint": None if saved is None else saved.name,
        "last_activity": active,
        "idle_seconds": max(0.0, now - active),
        "silent": bool(is_running and record.silent_for(now)),
        "bytes": record.size,
    }


def table(states: Sequence[dict[str, Any]], settings: Sequence[str]) -> list[str]:
    """One line per run under a line of titles; empty columns are left out."""
    from graft.train.monitor.formatting import visible
    from graft.train.monitor.labels import RUN_COLUMNS

    cells = [_cells(state, own) for state, own in zip(states, settings, strict=True)]
    shown = [column for column in range(len(RUN_COLUMNS)) if any(row[column] for row in cells)]
    rows = [[row[column] for column in shown] for row in (RUN_COLUMNS, *cells)]
    plain = [[visible(cell).replace("\n", " ").replace("\t", " ") for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in plain) for column in range(len(shown))]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in plain
    ]


def _cells(state: dict[str, Any], settings: str) -> tuple[str, ...]:
    from graft.runs import PHASE_WORDS

    step = "-"
    if state["phase"] is not None:
        of = "" if state["steps"] is None else f"/{state['steps']}"
        step = f"{PHASE_WORDS[state['phase']]} {state['step']}{of}"
    now = "-"
    if state["reward"] is not None:
        now = f"reward {state['reward']:.3f}"
    elif state["loss"] is not None:
        now = f"loss {state['loss']:.3f}"
    alarms = state["alarms"] and f", {state['alarms']} alarm{'s' * (state['alarms'] != 1)}"
    return (
        state["name"],
        f"{state['status']}{' (silent)' if state['silent'] else ''}{alarms or ''}",
        step,
        now,
        f"{_score(state['before'])} -> {_score(state['after'])}",
        settings,
        ago(state["idle_seconds"]),
        size_in_words(state["bytes"]),
    )


def _score(scores: dict[str, Any]) -> str:
    """The score of sampled attempts; "?" if unknown."""
    value = scores.get("sampled")
    return "?" if value is None else f"{value:.3f}"


def _finite(value: float | None) -> float | None:
    """JSON has no NaN."""
    return value if value is not None and abs(value) < float("inf") else None


def _plain(value: Any) -> Any:
    """A YAML value as JSON: infinities and dates become text."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return str(value)


def ago(seconds: float) -> str:
    """
    >>> ago(3), ago(200), ago(7200), ago(180000), ago(0.2)
    ('3 s ago', '3 min ago', '2 h ago', '2 days ago', 'now')
    """
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= 2 * length or (length < 60 and seconds >= length):
            return f"{int(seconds // length)} {unit} ago"
    return "now"


def size_in_words(count: int) -> str:
    """
    >>> size_in_words(512), size_in_words(18_944_000), size_in_words(2_500_000_000)
    ('1 kB', '19 MB', '2.5 GB')
    """
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{max(1, round(count / 1e3))} kB"
