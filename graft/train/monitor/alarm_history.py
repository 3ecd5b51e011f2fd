"""The recent metrics of a run, as alarm rules need them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

WINDOW = 5
"""Steps that are averaged: the value of one step may be chance."""
KEPT = 20
"""Latest values of a metric that are kept, besides the first WINDOW of the run."""
FULL_REWARD = 1.0
"""Reward of a correct attempt in the bundled environments; `graft eval --solved` has the same."""
SOLVED, STILL_SOLVED = 0.8, 0.65
"""Shares of FULL_REWARD: a mean reward at which the task counts as solved, and one that is noise since."""
TWINS_GAIN = "training/rewrites/gain"
"""Written only in steps that force calls; in other steps the gain of forcing is 0."""


class AlarmContext(NamedTuple):
    """What a run's recipe says about its numbers."""

    dtype: str
    staleness: int
    max_grad_norm: float
    is_grouped: bool = True
    """Whether attempts are compared with the others at their task."""


class AlarmHistory:
    """The first and the latest values of each watched metric."""

    def __init__(self, context: AlarmContext, state: Mapping[str, Any]) -> None:
        self.context = context
        self.start: dict[str, list[float]] = {k: [*v] for k, v in state.get("start", {}).items()}
        self.recent: dict[str, list[float]] = {k: [*v] for k, v in state.get("recent", {}).items()}
        self.best: float | None = state.get("best")
        """The best mean reward of WINDOW steps in a row."""
        self.highest: float | None = state.get("highest")
        """The best reward of a single step."""
        self.failure: str = state.get("failure", "")
        """The commonest reason in the latest step with failed attempts."""

    def to_json(self) -> dict[str, Any]:
        return {
            "start": {name: [*values] for name, values in self.start.items()},
            "recent": {name: [*values] for name, values in self.recent.items()},
            "best": self.best,
            "highest": self.highest,
            "failure": self.failure,
        }

    def add(self, metrics: Mapping[str, Any], watched: Iterable[str]) -> set[str]:
        """Keep this step's values of the watched metrics and return which have a finite one."""
        seen: set[str] = set()
        for name in watched:
            value = _number(metrics.get(name, 0.0 if name == TWINS_GAIN else None))
            if value is None:
                continue
            seen.add(name)
            first = self.start.setdefault(name, [])
            if len(first) < WINDOW:
                first.append(value)
            self.recent[name] = [*self.recent.get(name, []), value][-KEPT:]
        if "reward" in seen:
            now, last = self.now("reward"), self.recent["reward"][-1]
            self.highest = last if self.highest is None else max(self.highest, last)
            if now is not None:
                self.best = now if self.best is None else max(self.best, now)
        return seen

    def latest(self, name: str, count: int = WINDOW) -> list[float]:
        return self.recent.get(name, [])[-count:]

    def means(self, name: str) -> tuple[float, float]:
        """The means of the latest and of the first values of a metric, at most WINDOW each."""
        return fmean(self.latest(name)), fmean(self.start[name])

    def now(self, name: str) -> float | None:
        """Mean of the latest WINDOW values; None while there are fewer."""
        values = self.latest(name)
        return fmean(values) if len(values) == WINDOW else None

    def began(self, name: str) -> float | None:
        """Mean of the first WINDOW values; None while there are fewer."""
        values = self.start.get(name, [])
        return fmean(values) if len(values) >= WINDOW else None

    @property
    def spread(self) -> float:
        """Spread of rewards within groups when the run began: the scale of its rewards."""
        return max(self.began("reward_std") or 0.0, 0.1)

    @property
    def has_learned(self) -> bool:
        """Whether the reward is half a spread above its start."""
        return self.gained >= self.spread / 2

    @property
    def gained(self) -> float:
        """Reward above its start; 0 while that is unknown."""
        now, began = self.now("reward"), self.began("reward")
        return 0.0 if now is None or began is None else now - began

    @property
    def is_solved(self) -> bool:
        """Whether nearly all attempts earn FULL_REWARD, or did and still come near it.

        A step that earned more than FULL_REWARD shows another scale of rewards: then False.
        """
        now = self.now("reward")
        if now is None or self.best is None or self.highest is None:
            return False
        is_near = self.best >= SOLVED * FULL_REWARD and now >= STILL_SOLVED * FULL_REWARD
        return is_near and self.highest <= FULL_REWARD + 1e-6


def _number(value: Any) -> float | None:
    """A finite number that can be summed, or None for everything else."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < 1e300 else None  # false for NaN, too
