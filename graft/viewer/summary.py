"""A run in a headline and a few tables: result, settings, time, environment, metrics; the page shows them as
they are.

summary(RunRecord(Path("runs/quickstart")))["tables"][0]
{"title": "Held-out scores", "columns": ["held out", "before", "after", "change"],
 "rows": [["sampled", "0.310", "0.952", "+0.642"]], "folded": False}
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from graft.config import Config
from graft.runs import PHASE_WORDS, Curves, RunRecord, RunStatus
from graft.runs.curves import deviation, mean_of
from graft.runs.settings import env_names
from graft.train.monitor.formatting import clock_face, score
from graft.train.monitor.labels import SCORE_COLUMNS
from graft.viewer.expert_loads import expert_loads
from graft.viewer.headline import WORDS, headline

MAX_ROWS = 300
"""Of one table; a last row gives the number of those left out."""
MAX_CHARACTERS = 500
"""Of one value."""

Table = dict[str, Any]


def summary(record: RunRecord, seeds: Sequence[RunRecord] = ()) -> dict[str, Any]:
    """What a run was and what it reached; `seeds` are all runs of its recipe, itself included."""
    record.refresh()
    changed, everything = _settings(record)
    tables = [
        _seed_scores(seeds) if len(seeds) > 1 else _scores(record),
        changed,
        _supervised(record),
        *_times(record),
        _environment(record),
        everything,
        *(_metrics(phase, curves) for phase, curves in record.curves.items()),
    ]
    return {
        "status": str(record.status),
        "about": _about(record),
        "state": _state(record),
        "written": _moment(record.last_activity),
        **headline(record, seeds),
        "experts": expert_loads(record),
        "tables": [table for table in tables if table["rows"]],
    }


def _table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], folded: bool = False
) -> Table:
    listed = [[_text(value) for value in row] for row in rows]
    if len(listed) > MAX_ROWS:
        left_out = len(listed) - MAX_ROWS
        listed = [*listed[:MAX_ROWS], [f"… and {left_out:,} more"]]
    return {"title": title, "columns": list(columns), "rows": listed, "folded": folded}


def _about(record: RunRecord) -> str:
    """ "GRPO on calculator, 60 steps of 16 x 8 attempts, after a warm-up of 400 steps." """
    config = record.config
    if not config:
        return "There is no config.yaml that can be read."
    train, sft = config.get("train", {}), config.get("sft", {})
    rollout, model = config.get("rollout", {}), config.get("model", {})
    parts: list[str] = []
    if train.get("steps"):
        parts.append(
            f"{str(config.get('algo', {}).get('name', 'RL')).upper()} on "
            f"{env_names(config)}, {train['steps']} steps of "
            f"{rollout.get('tasks', '?')} x {rollout.get('samples', '?')} attempts"
        )
    if sft.get("steps") or sft.get("epochs"):
        length = f"{sft['steps']} steps" if sft.get("steps") else f"{sft['epochs']} epochs"
        source = f" on {sft['data']}" if sft.get("data") else ""
        warm_up = f"a warm-up of {length}{source}"
        parts.append(f"after {warm_up}" if parts else warm_up)
    parts.append(f"from {model['path']}" if model.get("path") else "from random weights")
    text = _text(", ".join(parts))
    return f"{text[:1].upper()}{text[1:]}."


def _state(record: RunRecord) -> str:
    """A sentence about a run that is not done."""
    status, last, saved = record.status, record.last, record.checkpoint
    if last is None:
        where = "before its first step"
    else:
        total = record.total_steps(last["phase"], last)
        of = "" if total is None else f" of {total}"
        where = f"at {PHASE_WORDS[last['phase']]} step {last['step']}{of}"
    if status is RunStatus.RUNNING:
        return f"This run is still going on, {where}; the numbers are those so far."
    if status is RunStatus.FAILED:
        why = "numbers that were not finite. The batch is in its folder failed/."
        return f"This run failed {where.replace('at ', 'after ', 1)}: {record.reason or why}"
    if status is RunStatus.STOPPED:
        kept = f"Its last checkpoint is {saved.name}." if saved else "Nothing was saved."
        return f"This run stopped {where}, before its end. {kept}"
    return ""


def _scores(record: RunRecord) -> Table:
    """Held-out scores before and after."""
    before, after = record.scores
    rows: list[Sequence[str]] = []
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        change = "-" if old is None or new is None else f"{new - old:+.3f}"
        rows.append((name, score(old), score(new), change))
    return _held_out("scores", [record], SCORE_COLUMNS, rows)


def _held_out(
    what: str, records: Sequence[RunRecord], columns: Sequence[str], rows: Iterable[Sequence[Any]]
) -> Table:
    """A table of numbers of held-out tasks, which its title calls so only if no run trains on them."""
    if any(record.leakage for record in records):
        return _table(f"{what.capitalize()}, not held out", ("score", *columns[1:]), rows)
    return _table(f"Held-out {what}", columns, rows)


def _seed_scores(records: Sequence[RunRecord]) -> Table:
    """Means over the seeds, with the sample's standard deviation over the runs that have the score."""
    pairs = [record.scores for record in records]
    rows: list[Sequence[str]] = []
    for name in dict.fromkeys(name for pair in pairs for scores in pair for name in scores):
        before = [old[name] for old, _ in pairs if name in old]
        after = [new[name] for _, new in pairs if name in new]
        change = f"{mean_of(after) - mean_of(before):+.3f}" if before and after else "-"
        runs = f"{len(before)}, {len(after)} of {len(records)}"
        rows.append((name, _spread(before), _spread(after), change, runs))
    columns = (*SCORE_COLUMNS, "runs with a score")
    return _held_out(f"scores over {len(records)} seeds", records, columns, rows)


def _spread(values: Sequence[float]) -> str:
    return f"{mean_of(values):.3f} ± {deviation(values):.3f}" if values else "-"


def _supervised(record: RunRecord) -> Table:
    given = record.summary.get("sft")
    scores: dict[str, Any] = given if isinstance(given, dict) else {}
    rows = _held_out("rows after the warm-up", [record], ("score", "value"), scores.items())
    return rows | {"folded": True}


def _times(record: RunRecord) -> list[Table]:
    """The time of each phase, and how fast tokens came."""
    phases: list[Sequence[str]] = []
    parts: list[Table] = []
    for phase, curves in record.curves.items():
        if not len(curves):
            continue
        seconds, speed = _total(curves["step_time"]), tokens_per_second(curves)
        phases.append(
            (
                PHASE_WORDS[phase],
                f"{len(curves):,}",
                clock_face(seconds),
                f"{_number(seconds / len(curves))} s",
                "-" if speed is None else f"{speed:,.0f}",
            )
        )
        shares = [
            (name.removeprefix("time/"), clock_face(part), f"{part / seconds:.0%}")
            for name in sorted(curves.columns)
            if name.startswith("time/") and seconds
            for part in [_total(curves[name])]
        ]
        title = f"Time within {PHASE_WORDS[phase]}"
        parts.append(_table(title, ("part", "time", "share of the steps"), shares, True))
    columns = ("phase", "steps", "time in steps", "time of a step", "tokens/s")
    spent: Any = record.summary.get("seconds_per_phase") or record.saved_state.get("seconds")
    known: dict[str, Any] = spent if isinstance(spent, dict) else {}
    whole = [
        (WORDS.get(name, name), clock_face(value))
        for name, value in known.items()
        if isinstance(value, int | float)
    ]
    return [
        _table("Time", columns, phases, True),
        *parts,
        _table("Time of the whole run", ("phase", "time"), whole, True),
    ]


def tokens_per_second(curves: Curves) -> float | None:
    """The rate over all steps: each counts by the time in which its tokens came.

    100 tokens/s for 3 seconds and 500 for 1 make 200.
    """
    times = curves["time/rollout" if "time/rollout" in curves else "step_time"]
    pairs = zip(curves["tokens_per_second"], times, strict=True)
    known = [(speed, took) for speed, took in pairs if math.isfinite(speed) and took > 0]
    time = sum(took for _, took in known)
    return sum(speed * took for speed, took in known) / time if time else None


def _settings(record: RunRecord) -> tuple[Table, Table]:
    """The recipe: first where it differs from the defaults, then all of it."""
    defaults = {
        f"{section}.{key}": value
        for section, info in Config.model_fields.items()
        for key, value in info.default.model_dump(mode="json").items()
    }
    rows: list[tuple[str, Any]] = []
    changed: list[tuple[str, Any, Any]] = []
    for section, keys in record.config.items():
        for key, value in keys.items():
            name = f"{section}.{key}"
            rows.append((name, value))
            if name not in defaults:
                changed.append((name, value, "(no such setting)"))
            elif defaults[name] != value:
                changed.append((name, value, defaults[name]))
    title = "Settings that differ from the defaults"
    return (
        _table(title, ("setting", "this run", "default"), changed),
        _table("All settings", ("setting", "value"), rows, folded=True),
    )


def _environment(record: RunRecord) -> Table:
    """Versions and machine, which a run writes when it ends."""
    found = record.summary
    rows: list[tuple[str, Any]] = []
    for group in ("versions", "machine"):
        given: Any = found.get(group)
        known: dict[str, Any] = given if isinstance(given, dict) else {}
        rows += known.items()
    if isinstance(found.get("parameters"), int):
        rows.append(("parameters", f"{found['parameters']:,}"))
    return _table("Environment", ("what", "value"), rows, True)


def _metrics(phase: str, curves: Curves) -> Table:
    rows: list[Sequence[str]] = []
    for metric in sorted(curves.columns):
        finite = [value for value in curves.columns[metric] if math.isfinite(value)]
        if finite:
            ends = (finite[0], finite[-1], min(finite), max(finite))
            rows.append((metric, *map(_number, ends)))
    title = f"Every metric of {PHASE_WORDS[phase]}"
    return _table(title, ("metric", "first", "last", "least", "greatest"), rows, folded=True)


def _text(value: Any) -> str:
    """Text as it is, floats in short, the rest as JSON; long values are cut."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, float):
        text = f"{value:g}"
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…"


def _number(value: float) -> str:
    """
    >>> [_number(v) for v in (0.0, 0.5, 12.0, 5512.4, 3.1e-07, 123456789.0)]
    ['0', '0.5', '12', '5,512', '3.1e-07', '1.23e+08']
    """
    if value and not 1e-3 <= abs(value) < 1e7:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _total(values: Sequence[float]) -> float:
    return sum(value for value in values if math.isfinite(value))


def _moment(seconds: float) -> str:
    if not seconds:
        return ""
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M %z")
    except (OverflowError, ValueError, OSError):  # a file dated in the year 30000
        return "at an unknown time"
