"""The metrics of a run as points of a chart: each has a step, seconds of training and wall time.

    {"phase": "sft", "step": 1, "loss": 3.0, "step_time": 2.0}
    {"phase": "rl", "step": 1, "reward": 0.25, "step_time": 2.0}
    {"phase": "rl", "step": 2, "reward": 0.75, "step_time": 3.0}

    rl   step [1, 2]   seconds [4, 7]   reward [0.25, 0.75]

Seconds are the sum of step times over all phases. Wall time is the line's own `time` (seconds since 1970)
where it has one; otherwise it is computed back from the file's modification time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from graft.runs import Curves, RunRecord
from graft.runs.curves import metric_over, spread

MAX_POINTS = 2000
"""Of one curve in one answer; longer ones are thinned by the mean of neighbours."""
TIME, STEP_TIME = "time", "step_time"


def metric_names(record: RunRecord) -> dict[str, list[str]]:
    """Phase -> its metrics; phases without a line are left out."""
    known = {phase: curves for phase, curves in record.curves.items() if len(curves)}
    return {phase: sorted(set(curves.columns) - {TIME}) for phase, curves in known.items()}


def points(
    record: RunRecord, phase: str, metrics: Sequence[str], most: int = MAX_POINTS
) -> dict[str, Any]:
    """At most `most` points of each metric; None where a line has no such number."""
    found = _of_phase(record, phase)
    share = max(math.ceil(len(found) / most), 1)
    seconds = _seconds(record, phase)
    return {
        "rows": len(found),
        "thinned": share,
        "step": _thin(found.steps, share, last=True),
        "seconds": _thin(seconds, share, last=True),
        "wall": _thin(_wall(record, found, seconds), share, last=True),
        "values": {name: _thin(found[name], share) for name in metrics if name in found},
    }


def band(
    records: Sequence[RunRecord], phase: str, metrics: Sequence[str], most: int = MAX_POINTS
) -> dict[str, Any]:
    """The mean of several runs and their spread, metric by metric, each with steps of its own."""
    runs = [_of_phase(record, phase) for record in records]
    seconds = spread(
        [(run.steps, _seconds(r, phase)) for run, r in zip(runs, records, strict=True)]
    )
    elapsed = dict(zip(seconds.steps, seconds.mean, strict=True))
    found: dict[str, Any] = {}
    for name in metrics:
        over = metric_over(runs, name)
        share = max(math.ceil(len(over.steps) / most), 1)
        found[name] = {
            "step": _thin(over.steps, share, last=True),
            "seconds": _thin([elapsed[step] for step in over.steps], share, last=True),
            "mean": _thin(over.mean, share),
            "low": _thin(over.low, share),
            "high": _thin(over.high, share),
            "std": _thin(over.std, share),
            "count": _thin(over.count, share, last=True),
        }
    return {name: run for name, run in found.items() if run["step"]}


def table(record: RunRecord, phase: str, metrics: Sequence[str]) -> Iterator[list[Any]]:
    """Every line of a phase: step, seconds, then the metrics; empty where there is no number."""
    found = _of_phase(record, phase)
    columns = [found[name] if name in found else [math.nan] * len(found) for name in metrics]
    times = _seconds(record, phase)
    for step, seconds, *values in zip(found.steps, times, *columns, strict=True):
        yield [step, round(seconds, 3), *("" if math.isnan(v) else v for v in values)]


def _of_phase(record: RunRecord, phase: str) -> Curves:
    return next((curves for name, curves in record.curves.items() if name == phase), Curves())


def _seconds(record: RunRecord, phase: str) -> list[float]:
    """Seconds since the first step of the run, at the end of each step of the phase."""
    before = 0.0
    for name, curves in record.curves.items():  # in the order in which a run goes through them
        took = [0.0 if math.isnan(value) else value for value in curves[STEP_TIME]]
        if name == phase:
            return list(accumulate(took, initial=before))[1:]
        before += sum(took)
    return []


def _wall(record: RunRecord, found: Curves, seconds: Sequence[float]) -> Sequence[float]:
    if TIME in found:
        return found[TIME]
    try:
        written = (record.path / "metrics.jsonl").stat().st_mtime
    except OSError:
        return [math.nan] * len(found)
    ends = [_seconds(record, phase)[-1] for phase, curves in record.curves.items() if len(curves)]
    return [written - max(ends) + second for second in seconds]


def _thin(values: Sequence[float], share: int, last: bool = False) -> list[float | None]:
    """The mean of every `share` finite numbers, or the last of them; NaN becomes None.

    >>> _thin([1.0, 3.0, float("nan"), 5.0], 2), _thin([1, 2, 3], 2, last=True)
    ([2.0, 5.0], [2, 3])
    """
    if share == 1:
        return [value if math.isfinite(value) else None for value in values]
    thinned: list[float | None] = []
    for start in range(0, len(values), share):
        here = [value for value in values[start : start + share] if math.isfinite(value)]
        mean = None if not here else here[-1] if last else sum(here) / len(here)
        thinned.append(mean)
    return thinned
