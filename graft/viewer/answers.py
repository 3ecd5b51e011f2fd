"""What the page asks, answered from run folders: one method per address, query strings in, JSON values out.

/api/runs                       every run: status, metrics, steps with episodes, alarms
/api/summary?run                a run in a headline, two attempts and a few tables
/api/pulse                      changes when there is something new
/api/curves?run&phase&metrics   points of curves;   /api/csv: all of them, as a file
/api/band?runs&phase&metrics    the mean of several runs at each step, and how far they spread
/api/tasks?run&step&sort&...    a page of the table of one step
/api/episode?run&step&line      a tree;   /api/tokens: a page of one walk;   /api/text: one span
/api/search?run&step&words      words in transcripts;   /api/occurrences?task: where else it was tried
/api/explain                    what metrics mean;   /api/settings: where runs differ
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from graft.registry import UnknownName
from graft.runs.settings import differing, seed_groups
from graft.train.monitor.metric_docs import explain
from graft.viewer import walks
from graft.viewer.curves import MAX_POINTS, band, metric_names, points, table
from graft.viewer.episodes import SORTS
from graft.viewer.highlights import highlights
from graft.viewer.runs import NotThere, ViewedRun
from graft.viewer.search import search
from graft.viewer.summary import summary

MAX_ROWS = 200
MAX_METRICS = 60
MAX_TOKENS = 2000
"""Of one page of a walk."""
PATIENCE = 0.5
"""Seconds that one request may spend on indexing; then it answers from the part that is indexed."""

Query = Mapping[str, str]


class BadRequest(ValueError):
    """A request that the page never makes; the message says what is wrong with it."""


class Answers:
    """The answers about some runs. Several threads may ask at once."""

    def __init__(self, runs: Sequence[ViewedRun]) -> None:
        self.runs = list(runs)

    def about(self, query: Query) -> Any:
        described = [run.describe() for run in self.runs]
        for numbers in self.seed_groups():
            for number in numbers:
                described[number]["seeds"] = numbers
        return {"runs": described}

    def seed_groups(self) -> list[list[int]]:
        """Numbers of the runs that differ in their seed alone; a run on its own is a group of one."""
        return seed_groups([run.record.config for run in self.runs])

    def summary(self, query: Query) -> Any:
        run = self._run(query)
        group = next(numbers for numbers in self.seed_groups() if run.number in numbers)
        with run.lock:
            found = summary(run.record, [self.runs[number].record for number in group])
        return {**found, "attempts": highlights(run, PATIENCE)}

    def pulse(self, query: Query) -> Any:
        return {"runs": [run.pulse() for run in self.runs]}

    def curves(
        self, query: Query, metrics: Sequence[str] | None = None, most: int = MAX_POINTS
    ) -> Any:
        run = self._run(query)
        chosen = _listed(query) if metrics is None else metrics
        with run.lock:
            run.record.refresh()
            return points(run.record, query.get("phase", "rl"), chosen, most)

    def band(
        self, query: Query, metrics: Sequence[str] | None = None, most: int = MAX_POINTS
    ) -> Any:
        """The named runs as one curve of each metric."""
        chosen = _listed(query) if metrics is None else metrics
        runs = [self._run({"run": number}) for number in query.get("runs", "0").split(",")]
        for run in runs:
            with run.lock:
                run.record.refresh()
        return band([run.record for run in runs], query.get("phase", "rl"), chosen, most)

    def sheet(self, query: Query) -> str:
        """Every line of the named runs as CSV."""
        metrics, phase = _listed(query), query.get("phase", "rl")
        numbers = query.get("runs", "0").split(",")
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["run", "phase", "step", "seconds", *metrics])
        for number in numbers:
            run = self._run({"run": number})
            with run.lock:
                run.record.refresh()
                rows = list(table(run.record, phase, metrics))
            writer.writerows([_harmless(run.name), phase, *row] for row in rows)
        return out.getvalue()

    def tasks(self, query: Query) -> Any:
        file = self._run(query).file(_step(query))
        sort = query.get("sort", "line")
        if sort not in SORTS:
            raise BadRequest(f"sort={sort[:40]}: known are {', '.join(SORTS)}")
        is_complete = file.index(PATIENCE)
        start, count = _whole(query, "start", 0), min(_whole(query, "count", 100), MAX_ROWS)
        is_falling = query.get("order", "rising") == "falling"
        with file.lock:
            order = file.order(sort, is_falling, query.get("status", ""), query.get("words", ""))
            rows = [file.glances[line].to_json() for line in order[start : start + count]]
            return {
                "total": len(order),
                "lines": len(file.glances),
                "statuses": sorted({name for g in file.glances for name in g.statuses}),
                "indexed": 1.0 if is_complete else file.progress,
                "start": start,
                "rows": rows,
            }

    def episode(self, query: Query) -> Any:
        return walks.tree(self._run(query), _step(query), _whole(query, "line"))

    def tokens(self, query: Query) -> Any:
        return walks.tokens(
            self._run(query),
            _step(query),
            _whole(query, "line"),
            _whole(query, "leaf", 0),
            _whole(query, "context", 0),
            _whole(query, "start", 0),
            min(_whole(query, "count", 1000), MAX_TOKENS),
        )

    def text(self, query: Query) -> Any:
        return walks.text(
            self._run(query),
            _step(query),
            _whole(query, "line"),
            _whole(query, "span"),
            _whole(query, "start", 0),
        )

    def search(self, query: Query) -> Any:
        words = query.get("words", "")
        if not 0 < len(words) <= 200:
            raise BadRequest("words: give 1 to 200 characters to look for")
        run = self._run(query)
        steps = list(run.files) if query.get("all") else [_step(query)]
        if not steps:
            return {"hits": [], "next": None}
        step = query.get("from", steps[0])
        return search(run, steps, words, step, _whole(query, "line", 0))

    def occurrences(self, query: Query) -> Any:
        """The steps of all runs in which a task was attempted, as far as they are indexed in time."""
        task = query.get("task", "")
        until = time.monotonic() + 2 * PATIENCE
        found: list[dict[str, Any]] = []
        is_complete = True
        for run in self.runs:
            for step, file in run.files.items():
                left = until - time.monotonic()
                if left > 0:
                    is_complete &= file.index(left)
                else:
                    is_complete = False
                line = file.find(task)
                if line is not None:
                    reward = file.glances[line].reward
                    found.append({"run": run.number, "step": step, "line": line, "reward": reward})
        return {"found": found[:2000], "is_complete": is_complete}

    def explain(self, query: Query) -> Any:
        """Metric -> its meaning, healthy values and remedies; metrics without a description are left out."""
        found: dict[str, Any] = {}
        for run in self.runs:
            with run.lock:
                names = {name for phase in metric_names(run.record).values() for name in phase}
            for name in names - found.keys():
                with suppress(UnknownName):
                    doc = explain(name)
                    found[name] = {"what": doc.what, "healthy": doc.healthy, "try": doc.remedy}
        return found

    def settings(self, query: Query) -> Any:
        """Setting -> its value in each run, for the settings that differ."""
        return differing([run.record.config for run in self.runs])

    def _run(self, query: Query) -> ViewedRun:
        number = _whole(query, "run", 0)
        if number >= len(self.runs):
            raise NotThere(f"there are {len(self.runs)} runs, numbered from 0; no run {number}")
        return self.runs[number]


def _whole(query: Query, name: str, default: int | None = None) -> int:
    given = query.get(name, default)
    if given is None or (isinstance(given, str) and not (given.isascii() and given.isdigit())):
        raise BadRequest(f"{name} must be a whole number, 0 or more; got {str(given)[:40]!r}")
    if len(str(given)) > 12:
        raise BadRequest(f"{name} is too large")
    return int(given)


def _step(query: Query) -> str:
    step = query.get("step", "")
    number = step.removeprefix("failed-")
    if not (number.isascii() and number.isdigit()):
        raise BadRequest(f"step must be a number, or failed-NUMBER; got {step[:40]!r}")
    return step


def _listed(query: Query) -> list[str]:
    names = [name for name in query.get("metrics", "").split(",") if name]
    return names[:MAX_METRICS]


def _harmless(name: str) -> str:
    """A folder called =cmd() must not become a formula in a spreadsheet."""
    return f"'{name}" if name[:1] in "=+-@" else name
