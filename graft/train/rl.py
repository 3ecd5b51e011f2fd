"""The loop: tasks -> episodes -> batch -> advantages -> update -> the engine's next version."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from graft.protocols import Stateful
from graft.rollout.batching import rows_of, to_batch
from graft.rollout.collect import collect, collect_informative
from graft.train.describe import describe, is_dead, why_it_died
from graft.train.folder import RunStopped
from graft.train.learner import Learner
from graft.train.setup import Parts
from graft.types import Author, Episode, Task

DYNAMIC_ROUNDS = 4
"""Draws per step of a preset that replaces flat groups (DAPO), where the recipe gives no number."""

TRAIN_SEEDS = 1_000_003
"""Tasks of seed s start at s * this: runs with different seeds see different tasks."""


HELD_OUT_SEEDS = 1 << 50


@dataclass(slots=True)
class TaskStream(Iterator[Task]):
    """Endless training tasks; `cursor` is all there is to save."""

    env: str
    seed: int
    cursor: int = 0

    def __next__(self) -> Task:
        number = self.seed * TRAIN_SEEDS + self.cursor
        self.cursor += 1
        return Task(f"{self.env}:train:{number}", self.env, seed=number)


def held_out_tasks(env: str, count: int) -> list[Task]:
    """The same for every run and seed, so that scores compare; no training seed reaches them."""
    seeds = range(HELD_OUT_SEEDS, HELD_OUT_SEEDS + count)
    return [Task(f"{env}:test:{seed}", env, seed=seed) for seed in seeds]


@dataclass(slots=True)
class Rollouts:
    """What a step has to learn from."""

    episodes: list[Episode]
    set_aside: int
    seconds: float


def learn(parts: Parts, learner: Learner, rollouts: Rollouts, step: int) -> dict[str, float]:
    """Batch, credit, update; the engine holds the learner's own tensors, so its weights are new too."""
    started = time.perf_counter()
    episodes = rollouts.episodes
    rows = rows_of(episodes)
    if is_dead(episodes):
        raise RunStopped(why_it_died(episodes))
    if not any(span.author is Author.POLICY for row in rows for span in row.spans):
        longest = max(len(episode.spans[0]) for episode in episodes)
        raise RunStopped(
            f"no attempt sampled a single token: prompts of up to {longest} tokens fill "
            f"rollout.max_context={parts.config.rollout.max_context}; raise it"
        )
    batch = parts.shape(learner.annotate(rows, to_batch(rows)))
    advantages = parts.credit(batch.zeros(), batch)
    returns = None if parts.returns is None else parts.returns(batch.zeros(), batch)
    batch = batch.replace(advantages=advantages, returns=returns)
    updated = learner.update(rows, batch)
    parts.engine.load(None, version=step)
    if isinstance(parts.branch, Stateful):
        parts.branch.settle(episodes)
    seconds = time.perf_counter() - started
    sampled = sum(len(s) for e in episodes for s in e.spans if s.author is Author.POLICY)
    learnt = {id(span): span for row in rows for span in row.spans}.values()  # shared ones once
    return {
        **describe(episodes),
        "advantages/std": float(advantages[batch.mask].std(correction=0))
        if batch.num_tokens
        else 0.0,
        "rollout/set_aside": float(rollouts.set_aside),
        **updated,
        "num_tokens": float(sampled),
        "num_trained_tokens": float(sum(sum(span.mask) for span in learnt)),
        "num_forward_tokens": float(sum(map(len, learnt))),
        "tokens_per_second": sampled / rollouts.seconds,
        "step_time": rollouts.seconds + seconds,
        "time/rollout": rollouts.seconds,
        "time/learn": seconds,
    }


def roll_out(parts: Parts, tasks: TaskStream, step: int) -> Rollouts:
    """The step's episodes; step 1 is the first."""
    started = time.perf_counter()
    config = parts.config
    if isinstance(parts.branch, Stateful):
        parts.branch.begin(step)
    salt = config.run.seed * TRAIN_SEEDS + step
    setting = replace(parts.setting, salt=salt)

    def some(wanted: Sequence[Task]) -> list[Episode]:
        return collect(wanted, setting, parts.branch, concurrency=config.rollout.concurrency)

    rounds = config.rollout.dynamic_rounds
    rounds = rounds or (DYNAMIC_ROUNDS if parts.preset.dynamic_sampling else 1)
    if rounds == 1:
        episodes, flat = some([next(tasks) for _ in range(config.rollout.tasks)]), []
    else:
        episodes, flat = collect_informative(tasks, config.rollout.tasks, some, rounds)
    return Rollouts(episodes, len(flat), time.perf_counter() - started)
