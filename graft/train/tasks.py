"""Which tasks a run trains on, and which are held out."""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from graft.recipe.attempt_keys import EnvItem
from graft.types import Task

TRAIN_SEEDS = 1_000_003
"""Tasks of seed s start at s * this: runs with different seeds get different tasks."""

HELD_OUT_SEEDS = 1 << 50
"""Held-out tasks start here; no training seed is that large."""


@dataclass(slots=True)
class TaskStream(Iterator[Task]):
    """Endless training tasks of one or several environments; a checkpoint keeps `cursor`.

    Each environment has its own tasks 0, 1, 2, ..., whatever comes between them:

        env=[a, b]    a:train:0, b:train:0, a:train:1, b:train:1, ...
    """

    env: str | Sequence[EnvItem]
    seed: int
    cursor: int = 0

    def __next__(self) -> Task:
        items = [EnvItem(env=self.env)] if isinstance(self.env, str) else self.env
        which, number = 0, self.cursor
        if len(items) > 1:
            weights = tuple(item.weight for item in items)
            which, number = interleaving(weights, self.seed)[self.cursor]
        self.cursor += 1
        return _task(items[which], "train", self.seed * TRAIN_SEEDS + number)


def held_out_tasks(env: str | EnvItem, count: int, rows: int | None = None) -> list[Task]:
    """The same for every run and seed, so that scores compare; of `rows` rows each is used once."""
    item = EnvItem(env=env) if isinstance(env, str) else env
    count = count if rows is None else min(count, rows)
    return [held_out_task(item, number) for number in range(count)]


def held_out_task(item: EnvItem, number: int) -> Task:
    return _task(item, "test", HELD_OUT_SEEDS + number)


def _task(item: EnvItem, split: str, seed: int) -> Task:
    """A task goes by the name of its environment, which finds its settings again."""
    source = item.env if item.name else ""
    return Task(f"{item.label}:{split}:{seed}", item.label, seed=seed, data_source=source)


def probe_of(item: EnvItem) -> Task:
    """A task for an environment that is made to look at it, not to pose a task."""
    return Task("probe", item.label)


class Interleaving:
    """Which environment each position of a stream has, and how many of its tasks came before.

    The environment that lags furthest behind its share comes next, so any stretch of the stream has the
    right mix, to a task or two per environment. Equal weights take turns; weights 2 and 1:

        position      0  1  2  3  4  5
        environment   0  1  0  0  1  0
        its task      0  0  1  2  1  3

    The seed decides where in such a pattern the stream begins.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        draw = random.Random(seed)
        self.shares = [weight / sum(weights) for weight in weights]
        self.phases = [draw.random() for _ in weights]
        self.counts = [0] * len(self.shares)
        self._which, self._numbers = array("I"), array("Q")
        self._extending = threading.Lock()

    def __getitem__(self, position: int) -> tuple[int, int]:
        with self._extending:
            while len(self._which) <= position:
                self._extend()
        return self._which[position], self._numbers[position]

    def _extend(self) -> None:
        # from the position, not summed up: sums of a million shares would be rounded
        place = len(self._which) + 1
        parts = zip(self.shares, self.phases, self.counts, strict=True)
        lags = [place * share + phase - count for share, phase, count in parts]
        which = lags.index(max(lags))
        self._which.append(which)
        self._numbers.append(self.counts[which])
        self.counts[which] += 1


@lru_cache(maxsize=16)
def interleaving(weights: tuple[float, ...], seed: int) -> Interleaving:
    """One object for all streams of a run: each position is computed once."""
    return Interleaving(weights, seed)
