"""Compare a replayed step with the recorded one, in the order of its computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from graft.models.tree.packing import response
from graft.replay.recorded_step import RecordedStep, RowKey
from graft.train.learner import Learner
from graft.train.rl import StepResult
from graft.train.run_dir.fingerprint import Prints, combine, differing, weights_prints
from graft.train.run_dir.token_log import TokenRow
from graft.train.step_metrics import describe
from graft.train.step_totals import SAMPLING_GAP
from graft.types import Episode

PASS, DIFFERS, UNKNOWN = "PASS", "DIFFERS", "-"

FLOOR = 1e-2
"""Floor of the relative comparison: a loss is a sum of terms that cancel."""

LOGPROB_FLOOR = 5.0
"""The same for log-probs. On a GPU, weights whose last bits differ moved single ones by 0.05."""

NOT_LEARNED = ("step_time", "tokens_per_second", "time/", "engine/", "sampling/entropy_top_k")
"""Prefixes of metrics about time or the engine, which a replay does not have."""


class StepDifference(NamedTuple):
    """One comparison."""

    step: int
    what: str
    verdict: str
    text: str


def compare_weights(
    step: RecordedStep, when: str, learner: Learner, is_inexact: bool
) -> StepDifference:
    what = f"weights {when}"
    if step.record is None:
        return StepDifference(step.number, what, UNKNOWN, "no fingerprint was recorded")
    recorded: Prints = getattr(step.record, when)
    seen = weights_prints(learner)
    others = differing(seen, recorded)
    if not others:
        return StepDifference(step.number, what, PASS, f"fingerprint {combine(seen)}")
    if is_inexact:
        text = f"{len(others)} of {len(seen)} tensors have other bits, which is expected here"
        return StepDifference(step.number, what, UNKNOWN, text)
    text = (
        f"fingerprint {combine(seen)}, recorded {combine(recorded)}: {len(others)} of {len(seen)} "
        f"tensors differ, first {others[0]}"
    )
    return StepDifference(step.number, what, DIFFERS, text)


def compare_step(
    step: RecordedStep, made: StepResult, learner: Learner, tolerance: float, is_inexact: bool
) -> Iterator[StepDifference]:
    """All quantities of a step, in the order of their computation."""
    number = step.number
    recorded = {
        name: value
        for name, value in step.metrics.items()
        if name in made.metrics and not name.startswith(NOT_LEARNED)
    }
    seen = set(describe(step.episodes))
    yield _numbers(number, "attempts", made.metrics, _some(recorded, seen), tolerance)
    yield from _rows(step, made, tolerance)
    named = {"loss", "grad_norm"}
    for name in ("loss", "grad_norm"):
        if name in recorded:
            yield _numbers(number, name, made.metrics, _some(recorded, {name}), tolerance)
    rest = set(recorded) - seen - named
    yield _numbers(number, "other metrics", made.metrics, _some(recorded, rest), tolerance)
    yield compare_weights(step, "after", learner, is_inexact)


def _some(metrics: Mapping[str, float], names: set[str]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name in names}


def _numbers(
    step: int, what: str, now: Mapping[str, float], recorded: Mapping[str, float], tolerance: float
) -> StepDifference:
    """Metrics by name; the text names the largest difference."""
    apart: dict[str, float] = {}
    for name, value in recorded.items():
        # this metric is itself a difference of log-probs
        floor = LOGPROB_FLOOR if name.startswith(SAMPLING_GAP) else FLOOR
        off = float(_off(np.float64(now[name]), np.float64(value), floor))
        if not off <= tolerance:
            apart[name] = off
    if not recorded:
        return StepDifference(step, what, UNKNOWN, "nothing was recorded")
    if apart:
        worst = max(apart, key=lambda name: apart[name])
        text = f"{now[worst]:.9g}, recorded {recorded[worst]:.9g}"
        if len(recorded) > 1:
            text = f"{len(apart)} of {len(recorded)} numbers differ, most {worst}: {text}"
        return StepDifference(step, what, DIFFERS, text)
    if len(recorded) == 1:
        (name,) = recorded
        return StepDifference(step, what, PASS, f"{now[name]:.9g}")
    return StepDifference(step, what, PASS, f"{len(recorded)} numbers")


def _off(now: Any, recorded: Any, floor: float) -> Any:
    """Relative difference; 0 where both are NaN, infinite where one is."""
    size = np.maximum(np.maximum(np.abs(now), np.abs(recorded)), floor)
    with np.errstate(invalid="ignore"):
        off = np.where(now == recorded, 0.0, np.abs(now - recorded) / size)
    both = np.isnan(now) & np.isnan(recorded)
    return np.where(both, 0.0, np.where(np.isnan(off), np.inf, off))


def _rows(step: RecordedStep, made: StepResult, tolerance: float) -> Iterator[StepDifference]:
    """Advantages and log-probs, token by token."""
    batch, logprobs = made.batch, made.logprobs
    assert batch.advantages is not None and logprobs is not None
    if step.rows is None:
        for what in ("advantages", "log-probs"):
            yield StepDifference(step.number, what, UNKNOWN, "none were recorded")
        return
    lines = {id(episode): number for number, episode in enumerate(step.episodes)}
    places = [(lines[id(row.episode)], row.leaf_index, row.context) for row in batch.trajectories]
    lengths = [sum(map(len, response(row))) for row in batch.trajectories]
    known = logprobs.masked_fill(~batch.mask, math.nan)
    grids: dict[str, tuple[Tensor, Callable[[TokenRow], np.ndarray], float]] = {
        "advantages": (batch.advantages, lambda row: row.advantages, FLOOR),
        "log-probs": (known, lambda row: row.logprobs, LOGPROB_FLOOR),
    }
    for what, (grid_NT, get, floor) in grids.items():
        now = {
            key: row[:length]
            for key, row, length in zip(places, grid_NT.float().cpu().numpy(), lengths, strict=True)
        }
        recorded = {key: get(row) for key, row in step.rows.items()}
        verdict, text = _compare_rows(now, recorded, step.episodes, tolerance, floor)
        yield StepDifference(step.number, what, verdict, text)


def _compare_rows(
    now: Mapping[RowKey, np.ndarray],
    recorded: Mapping[RowKey, np.ndarray],
    episodes: Sequence[Episode],
    tolerance: float,
    floor: float,
) -> tuple[str, str]:
    apart: list[tuple[float, RowKey, int]] = []
    for key in dict.fromkeys((*recorded, *now)):
        mine, theirs = now.get(key), recorded.get(key)
        if mine is None or theirs is None or len(mine) != len(theirs):
            has = [f"{0 if row is None else len(row)} tokens" for row in (mine, theirs)]
            return DIFFERS, f"{_where(key, episodes)} has {has[0]}, recorded {has[1]}"
        off = _off(mine, theirs, floor)
        if (off > tolerance).any():
            token = int(off.argmax())
            apart.append((float(off[token]), key, token))
    count = sum(map(len, now.values()))
    if not apart:
        return PASS, f"{count:,} tokens of {len(now)} rows"

    def described(which: tuple[float, RowKey, int]) -> str:
        _, key, token = which
        values = f"{now[key][token]:.9g}, recorded {recorded[key][token]:.9g}"
        return f"{_where(key, episodes)}, token {token}: {values}"

    worst = max(apart, key=lambda which: which[0])
    more = "" if worst == apart[0] else f"; most at {described(worst)}"
    return DIFFERS, f"{len(apart)} of {len(now)} rows differ, first at {described(apart[0])}{more}"


def _where(key: RowKey, episodes: Sequence[Episode]) -> str:
    line, leaf, context = key
    task = episodes[line].task.id if line < len(episodes) else f"line {line + 1}"
    return f"task {task}, leaf {leaf}" + (f", context {context}" if context else "")
