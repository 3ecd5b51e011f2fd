"""`graft runs` lists the runs in a folder; `graft watch RUN` follows one while it trains.

$ graft runs
run         status   step             now           held out    settings   active      size
quickstart  running  reinforce 12/60  reward 0.500  0.310 -> ?  lr 0.0002  3 s ago     18 MB
first-try   stopped  warm-up 60/400   loss 1.636    ? -> ?      lr 0.002   2 days ago  12 MB
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graft.commands.options import AsJson, Run

if TYPE_CHECKING:
    from graft.runs import RunRecord


def runs(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder of the runs.")] = "runs",
    as_json: AsJson = False,
) -> None:
    """List runs: status, progress, scores, settings that differ."""
    from graft.config import ConfigError
    from graft.runs import RunRecord, find_runs
    from graft.runs.settings import differing, in_short

    if folder != "runs" and not Path(folder).is_dir():
        raise ConfigError(f"there is no folder '{folder}'; give the one that holds your runs")
    found = [
        record
        for path in find_runs(Path(folder))
        if _is_safe(path) and not _is_refused(record := RunRecord(path))
    ]
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
        typer.echo(f"no runs in {folder}/; `graft train quickstart` makes one in minutes")


def _is_safe(run: Path) -> bool:
    from graft.train.monitor.printable import visible
    from graft.trust.links import OutsideLink, check_shown_run

    try:
        check_shown_run(run)
    except OutsideLink as error:
        typer.echo(f"graft: {run} is left out: {visible(str(error))}", err=True)
        return False
    return True


def _is_refused(record: RunRecord) -> bool:
    """Whether the run ended before its first step: its settings or its machine were at fault."""
    return bool(record.reason) and record.last is None and record.checkpoint is None


def watch(run: Run, as_json: AsJson = False) -> None:
    """Follow a run until it ends. A live table in a terminal, a line per step elsewhere."""
    from graft.runs import find_run
    from graft.runs.follower import Follower, StepClock
    from graft.train.monitor.display import Display

    record = find_run(run)
    clock = StepClock()
    with Display(0, json=as_json, clock=clock, plain_seconds=0) as display:  # every recorded step
        Follower(record, display, clock).follow()
    if as_json:
        typer.echo(json.dumps(state_of(record, time.time())))


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
        "leakage": record.leakage,
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
    from rich.cells import cell_len  # some characters take two columns

    from graft.train.monitor.labels import RUN_COLUMNS
    from graft.train.monitor.printable import visible

    cells = [_cells(state, own) for state, own in zip(states, settings, strict=True)]
    shown = [column for column in range(len(RUN_COLUMNS)) if any(row[column] for row in cells)]
    rows = [[row[column] for column in shown] for row in (RUN_COLUMNS, *cells)]
    plain = [[visible(cell).replace("\n", " ").replace("\t", " ") for cell in row] for row in rows]
    widths = [max(cell_len(row[column]) for row in plain) for column in range(len(shown))]
    padded = (
        (cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
        for row in plain
    )
    return ["  ".join(row).rstrip() for row in padded]


def _cells(state: dict[str, Any], settings: str) -> tuple[str, ...]:
    from graft.runs import PHASE_WORDS
    from graft.runs.follower import ago

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
        f"{_score(state['before'])} -> {_score(state['after'])}{' (trained on)' * bool(state['leakage'])}",
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


def size_in_words(count: int) -> str:
    """
    >>> size_in_words(512), size_in_words(18_944_000), size_in_words(2_500_000_000)
    ('1 kB', '19 MB', '2.5 GB')
    """
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{max(1, round(count / 1e3))} kB"
