"""Held-out tasks that a run trains on, found by what they ask, before its first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from graft.config import Config, load_config
from graft.data.errors import DataError
from graft.data.location import open_location
from graft.envs.dataset.shared_rows import RowSet, shared_rows
from graft.envs.table import build_env
from graft.protocols import Env
from graft.train.monitor.check import PASS, WARN, Check
from graft.train.tasks import HELD_OUT_SEEDS, probe_of
from graft.trust.ownership import why_not_own
from graft.types import Task

UNREADABLE = (DataError, ValueError, TypeError, OSError, ImportError)
"""What opening rows can raise that are not there, or no longer: nothing can be compared with them."""


@dataclass(frozen=True, slots=True)
class Leakage:
    """How many held-out tasks of one set are rows that the run trains on.

    >>> print(Leakage("math", 40, 12, {"sft.data": 12}))
    12 of 40 held-out tasks are rows that this run trains on (sft.data)
    """

    name: str
    tasks: int
    leaked: int
    rows_of: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many of them each source of training rows has."""
    sampled: Sequence[str] = ()
    """Sources of which only a part was compared: "100,000 of the 2,000,000 rows of sft.data"."""

    def __str__(self) -> str:
        if not self.leaked:
            return ""
        rows = "are rows" if self.leaked > 1 else "is a row"
        what = "rows" if self.name == "sft.eval_data" else "tasks"
        where = ", ".join(self.rows_of)
        return f"{self.leaked} of {self.tasks} held-out {what} {rows} that this run trains on ({where})"

    def to_json(self) -> dict[str, Any]:
        found = {"tasks": self.tasks, "leaked": self.leaked, "rows_of": dict(self.rows_of)}
        return {**found, "sampled": list(self.sampled)}


def find_leakage(held_out: Sequence[RowSet], trained: Sequence[RowSet]) -> list[Leakage]:
    """Find the tasks of each held-out set that the training rows have too."""
    found: list[dict[str, set[int]]] = [{} for _ in held_out]
    # a run's own checkpoint names the same rows again
    trained = [one for at, one in enumerate(trained) if not any(map(one.is_same, trained[:at]))]
    for source in trained:
        for own, rows in zip(found, shared_rows(held_out, source), strict=True):
            own.update({source.name: rows} if rows else {})
    sampled = [source.sampling for source in trained if source.sampling]
    return [
        Leakage(
            one.name,
            len(one.numbers),
            len(set().union(*own.values())) * one.step,
            {name: len(rows) * one.step for name, rows in own.items()},
            [*sampled, *([one.sampling] if one.sampling else [])],
        )
        for one, own in zip(held_out, found, strict=True)
    ]


def trained_rows(config: Config, envs: Mapping[str, Callable[[], Env]]) -> Iterator[RowSet]:
    """The rows that a recipe trains on: those of the warm-up, and those of its environments.

    envs   how each environment of the run is made, by its label
    """
    sft = config.sft
    if sft.is_on and sft.data:
        yield from _rows_at("sft.data", sft.data)
    is_trained = config.train.steps or (sft.is_on and not sft.data)  # else tasks are only scored
    for label, make in envs.items() if is_trained else ():
        try:
            with closing(make()) as env:
                rows = RowSet.of_env("task rows" if len(envs) == 1 else f"rows of {label}", env)
        except UNREADABLE:
            continue
        if rows is not None:
            yield rows
    yield from _earlier_rows(Path(config.model.path))


def _earlier_rows(model: Path) -> Iterator[RowSet]:
    """The rows of the run that a model comes from, if this user started it, and of those before it."""
    places = [] if model == Path() else [model, model.parent.parent]
    file = next((one / "config.yaml" for one in places if (one / "config.yaml").is_file()), None)
    if file is None or why_not_own(file):
        return
    try:
        config = load_config(str(file))
    except UNREADABLE:
        return
    for rows in trained_rows(config, env_makers(config)):
        yield replace(rows, name=f"{rows.name} of the run {config.run.name}")


def env_makers(config: Config) -> dict[str, Callable[[], Env]]:
    """How each environment of a recipe is made, by its label, without its wrappers."""
    return {
        item.label: partial(build_env, item.env, **(item.args or {})) for item in config.task.envs
    }


def _rows_at(name: str, path: str) -> Iterator[RowSet]:
    try:
        table = open_location(path, check=False)
    except UNREADABLE:
        return
    yield RowSet(name, table, range(len(table)))


def run_leakage(
    config: Config, env: Callable[[Task], Env], held_out: Callable[[Task], Env]
) -> list[Leakage]:
    """The leakage of every set of held-out tasks and rows that a run scores."""
    count = config.run.eval_tasks
    seeds = range(HELD_OUT_SEEDS, HELD_OUT_SEEDS + count)
    sets: list[RowSet] = []
    for item in config.held_out_envs if count else []:
        with closing(held_out(probe_of(item))) as scored:
            if (rows := RowSet.of_env(item.label, scored, seeds)) is not None:
                sets.append(rows)
    if config.sft.is_on and config.sft.eval_data:
        sets += _rows_at("sft.eval_data", config.sft.eval_data)
    if not sets:
        return []
    makers = {item.label: partial(env, probe_of(item)) for item in config.task.envs}
    return find_leakage(sets, list(trained_rows(config, makers)))


def in_words(found: Sequence[Leakage]) -> str:
    """All that has leaked, in one line; "" if nothing has."""
    several = len(found) > 1
    texts = [f"{one.name}: {one}" if several else str(one) for one in found if one.leaked]
    return "; ".join(texts)


def to_json(found: Sequence[Leakage]) -> dict[str, Any]:
    """The entry in `summary.json` and checkpoints.

    {"note": "", "sets": {"math": {"tasks": 40, "leaked": 0, ...}}}
    """
    return {"note": in_words(found), "sets": {one.name: one.to_json() for one in found}}


def held_out_check(found: Sequence[Leakage]) -> Check | None:
    """A warning if held-out tasks are rows that the run trains on; None if none of all rows is."""
    sampled = list(dict.fromkeys(text for one in found for text in one.sampled))
    compared = f"compared: {'; '.join(sampled)}" if sampled else ""
    if text := in_words(found):
        remedy = (
            "keep one row in ten for scores: task.args.split=train task.eval_args.split=test; or name a file "
            "for them: task.eval_args.data=FILE. Rows of sft.data that are scored must leave that file"
        )
        seen = f"{text}: scores measure memory too"
        return Check("held out", WARN, f"{seen} ({compared})" if compared else seen, remedy)
    return (
        Check("held out", PASS, f"no held-out task was found among them; {compared}")
        if compared
        else None
    )
