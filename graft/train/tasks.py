"""Which tasks a run trains on, and which are held out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graft.types import Task

TRAIN_SEEDS = 1_000_003
"""Tasks of seed s start at s * this: runs with different seeds get different tasks."""

HELD_OUT_SEEDS = 1 << 50
"""Held-out tasks start here; no training seed is that large."""


@dataclass(slots=True)
class TaskStream(Iterator[Task]):
    """Endless training tasks; a checkpoint keeps `cursor`."""

    env: str
    seed: int
    cursor: int = 0

    def __next__(self) -> Task:
        number = self.seed * TRAIN_SEEDS + self.cursor
        self.cursor += 1
        return Task(f"{self.env}:train:{number}", self.env, seed=number)


def held_out_tasks(env: str, count: int) -> list[Task]:
    """The same for every run and seed, so that scores compare."""
    seeds = range(HELD_OUT_SEEDS, HELD_OUT_SEEDS + count)
    return [Task(f"{env}:test:{seed}", env, seed=seed) for seed in seeds]
