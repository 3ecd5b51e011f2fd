"""The tables of a report: scores, alarms, every metric, settings, environment, time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from graft.config import Config
from graft.report.curves import number
from graft.report.markup import folded, note, section, shown, table
from graft.runs import PHASE_WORDS, Curves, RunRecord
from graft.train.monitor.formatting import clock_face, score
from graft.train.monitor.labels import SCORE_COLUMNS

MOST_ROWS = 400
"""Of any table; the number of the rest is told."""

SECRET = ("api_key", "apikey", "password", "passwd", "secret", "access_token", "auth_token")
"""A report goes to other people: what stands under such a name stays at home."""


def scores(record: RunRecord) -> str:
    """Held-out scores before and after; those of rows where a run is supervised alone."""
    before, after = record.scores
    supervised = record.summary.get("sft")
    rows = [
        (
            shown(name),
            score(before.get(name)),
            score(after.get(name)),
            _change(name, before.get(name), after.get(name)),
        )
        for name in dict.fromkeys([*before, *after])
    ]
    parts = [table(rows[:MOST_ROWS], SCORE_COLUMNS)] if rows else []
    if isinstance(supervised, dict) and supervised:
        known: dict[str, Any] = supervised
        listed = [(shown(name), _value(value)) for name, value in known.items()]
        parts.append(table(listed[:MOST_ROWS], ("warm-up", "")))
    if not parts:
        parts.append(note("Nothing was scored on held-out tasks, or not yet."))
    return section("Before and after", *parts)


def alarms(record: RunRecord) -> str:
    found = record.alarms
    rows = [
        (
            f'<span class="{_level(alarm.level)}">{shown(alarm.level or "alarm", 40)}</span>',
            f"{shown(_phase_word(alarm.phase), 40)} {alarm.step}",
            shown(alarm.metric, 100),
            shown(alarm.text, 600),
        )
        for alarm in found[:MOST_ROWS]
    ]
    parts = [table(rows, ("", "step", "metric", "what was seen"))] if rows else []
    return section("Alarms", *parts, _more(len(found)))


def metrics(name: str, curves: Curves) -> str:
    """Every metric of a phase in four numbers."""
    rows: list[Sequence[str]] = []
    for metric in sorted(curves.columns)[:MOST_ROWS]:
        finite = [value for value in curves.columns[metric] if math.isfinite(value)]
        if finite:
            ends = (finite[0], finite[-1], min(finite), max(finite))
            rows.append((shown(metric, 120), *map(number, ends)))
    if not rows:
        return ""
    inside = table(rows, ("metric", "first", "last", "least", "greatest"))
    return folded(f"every metric of this phase ({name})", inside + _more(len(curves.columns)))


def settings(record: RunRecord) -> str:
    """What the recipe says, first where it differs from the defaults."""
    found = [
        (f"{section_name}.{key}", key, value)
        for section_name, keys in record.config.items()
        for key, value in keys.items()
    ]
    if not found:
        return section("Configuration", note("There is no config.yaml that can be read."))
    defaults = _defaults()
    rows = [(shown(name, 120), _setting(key, value)) for name, key, value in found]
    changed = [
        (*row, _setting(key, defaults[name]) if name in defaults else "<i>none</i>")
        for row, (name, key, value) in zip(rows, found, strict=True)
        if name not in defaults or defaults[name] != value
    ]
    return section(
        "Configuration",
        table(changed[:MOST_ROWS], ("differs from the default", "this run", "default")),
        _more(len(changed)),
        folded("all settings", table(rows[:MOST_ROWS]) + _more(len(rows))),
    )


def environment(record: RunRecord) -> str:
    """Versions and machine, which a run writes down when it ends."""
    summary = record.summary
    rows: list[Sequence[str]] = []
    for group in ("versions", "machine"):
        known: Any = summary.get(group)
        if isinstance(known, dict):
            named: dict[str, Any] = known
            rows += [(shown(name), _value(value)) for name, value in named.items()]
    if isinstance(summary.get("parameters"), int):
        rows.append(("parameters", f"{summary['parameters']:,}"))
    if not rows:
        return section("Environment", note("A run writes down its environment when it ends."))
    return section("Environment", table(rows[:MOST_ROWS]))


def timings(record: RunRecord) -> str:
    """Where the time went, phase by phase, and how fast tokens came."""
    rows: list[Sequence[str]] = []
    parts: list[str] = []
    for phase, curves in record.curves.items():
        if not len(curves):
            continue
        seconds = total(curves["step_time"])
        speed = tokens_per_second(curves)
        rows.append(
            (
                PHASE_WORDS[phase],
                f"{len(curves):,}",
                clock_face(seconds),
                number(seconds / len(curves)) + " s",
                "-" if speed is None else f"{speed:,.0f}",
            )
        )
        shares = [
            (shown(name.removeprefix("time/"), 120), clock_face(part), f"{part / seconds:.0%}")
            for name in sorted(curves.columns)
            if name.startswith("time/") and seconds
            for part in [total(curves[name])]
        ]
        if shares:
            titles = (f"within {PHASE_WORDS[phase]}", "time", "share of its steps")
            parts.append(table(shares[:MOST_ROWS], titles))
    if rows:
        titles = ("phase", "steps", "time in steps", "a step", "tokens/s")
        parts.insert(0, table(rows, titles))
    spent = _seconds_per_phase(record)
    if spent:
        listed = [(shown(name), clock_face(value)) for name, value in spent.items()]
        parts.append(table(listed[:MOST_ROWS], ("whole run, by the clock", "time")))
    return section("Time", *parts)


def tokens_per_second(curves: Curves) -> float | None:
    """Over all steps: each counts by the time in which its tokens came.

    100 tokens/s for 3 seconds and 500 for 1 make 200.
    """
    times = curves["time/rollout" if "time/rollout" in curves else "step_time"]
    pairs = zip(curves["tokens_per_second"], times, strict=True)
    known = [(speed, took) for speed, took in pairs if math.isfinite(speed) and took > 0]
    time = sum(took for _, took in known)
    return sum(speed * took for speed, took in known) / time if time else None


def total(values: Sequence[float]) -> float:
    return sum(value for value in values if math.isfinite(value))


def _seconds_per_phase(record: RunRecord) -> dict[str, float]:
    """By the summary, or as the newest checkpoint knows them."""
    spent: Any = record.summary.get("seconds_per_phase")
    if not spent and record.checkpoint is not None:
        spent = record.checkpoint.state.get("seconds")
    if not isinstance(spent, dict):
        return {}
    known: dict[Any, Any] = spent
    return {
        _phase_word(str(name)): float(value)
        for name, value in known.items()
        if isinstance(value, int | float)
    }


def _phase_word(name: str) -> str:
    words: Mapping[str, str] = {**PHASE_WORDS, "eval": "evaluation"}
    return words.get(name, name)


def _defaults() -> dict[str, Any]:
    return {
        f"{name}.{key}": value
        for name, info in Config.model_fields.items()
        for key, value in info.default.model_dump(mode="json").items()
    }


def _setting(key: str, value: Any) -> str:
    return f"<code>{_value(_without_secrets(key, value))}</code>"


def _without_secrets(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        inner: dict[Any, Any] = value
        return {name: _without_secrets(str(name), one) for name, one in inner.items()}
    if isinstance(value, list):
        listed: list[Any] = value
        return [_without_secrets(key, one) for one in listed]
    is_secret = isinstance(value, str) and value and any(word in key.lower() for word in SECRET)
    return "(left out)" if is_secret else value


def _value(value: Any) -> str:
    """Text as it is, numbers as they are written, the rest as JSON."""
    if isinstance(value, str):
        return shown(value) if value else "<i>empty</i>"
    if isinstance(value, float):
        return shown(f"{value:g}")
    return shown(json.dumps(value, ensure_ascii=False, default=str))


def _change(name: str, before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return "-"
    # more calls of a tool are neither good nor bad
    colour = "" if name == "tool_rate" or after == before else "up" if after > before else "down"
    return f'<span class="{colour}">{after - before:+.3f}</span>'


def _level(level: str) -> str:
    return "warn" if level == "warn" else "alarm"


def _more(count: int) -> str:
    return note(f"… and {count - MOST_ROWS:,} more") if count > MOST_ROWS else ""
