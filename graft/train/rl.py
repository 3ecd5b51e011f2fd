"""The loop: tasks -> episodes -> batch -> advantages -> update -> the engine's next version."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from graft.algos.batch import Batch
from graft.protocols import Stateful
from graft.rollout.batching import to_batch, trajectories_of
from graft.rollout.collect import collect_informative
from graft.rollout.collectors.collector import Collector
from graft.rollout.collectors.request import RolloutRequest
from graft.rollout.collectors.staleness import StalenessWindow
from graft.train.build import RunComponents
from graft.train.learner import Learner
from graft.train.run_dir.folder import RunStopped
from graft.train.step_metrics import describe, is_dead, missing, why_it_died
from graft.types import Author, Episode, Task, Trajectory

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
class StepRollouts:
    """What a step has to learn from."""

    episodes: list[Episode]
    set_aside: int
    seconds: float
    """Until they were there."""
    cursor: int
    """Of the task stream behind them."""
    numbers: dict[str, float] = field(default_factory=dict[str, float])
    """What the collector has to tell."""


@dataclass(slots=True)
class StepResult:
    """What a step has learned, row by row; `batch` has the advantages."""

    metrics: dict[str, float]
    rows: list[Trajectory]
    batch: Batch
    logprobs: Tensor | None
    """The learner's own before its first update, [N, T]; None where nobody asked it to keep them."""


def learn(
    components: RunComponents, learner: Learner, rollouts: StepRollouts, step: int
) -> StepResult:
    """Batch, credit, update."""
    started = time.perf_counter()
    episodes = rollouts.episodes
    rows = trajectories_of(episodes)
    if is_dead(episodes):
        raise RunStopped(why_it_died(episodes))
    if not any(span.author is Author.POLICY for row in rows for span in row.spans):
        longest = max(len(episode.spans[0]) for episode in episodes)
        raise RunStopped(
            f"no attempt sampled a single token: prompts of up to {longest} tokens fill "
            f"rollout.max_context={components.config.rollout.max_context}; raise it"
        )
    batch = components.shape(learner.annotate(rows, to_batch(rows)))
    advantages = components.credit(batch.zeros(), batch)
    returns = None if components.returns is None else components.returns(batch.zeros(), batch)
    batch = batch.replace(advantages=advantages, returns=returns)
    updated = learner.update(rows, batch)
    if isinstance(components.branch, Stateful):
        components.branch.settle(episodes)
    seconds = time.perf_counter() - started
    sampled = sum(len(s) for e in episodes for s in e.spans if s.author is Author.POLICY)
    learnt = {id(span): span for row in rows for span in row.spans}.values()  # shared ones once
    age = (step - 1 - batch.versions[batch.mask]).float()
    metrics = {
        **describe(episodes),
        "rollout/missing": missing(episodes, components.config.rollout.samples),
        **rollouts.numbers,
        "sampling/entropy_top_k": float(components.entropy_top_k),
        "advantages/std": float(advantages[batch.mask].std(correction=0))
        if batch.num_tokens
        else 0.0,
        "rollout/set_aside": float(rollouts.set_aside),
        "staleness/mean": float(age.mean()) if len(age) else 0.0,
        "staleness/max": float(age.max()) if len(age) else 0.0,
        **updated,
        "num_tokens": float(sampled),
        "num_trained_tokens": float(sum(sum(span.mask) for span in learnt)),
        "num_forward_tokens": float(sum(map(len, learnt))),
        "tokens_per_second": sampled
        / (rollouts.seconds + (seconds if components.is_ahead else 0.0)),
        "step_time": rollouts.seconds + seconds,
        "time/rollout": rollouts.seconds,
        "time/learn": seconds,
    }
    # with several updates a batch they were computed before the first; else by the only one
    logprobs = learner.logprobs if batch.old_logprobs is None else batch.old_logprobs
    return StepResult(metrics, rows, batch, logprobs)


class RolloutSource:
    """Where the loop's episodes come from: a stream of tasks, and a collector that attempts them.

    With `rollout.staleness` the collector works ahead of the learner, and stops when it is so many steps
    ahead; the learner waits where there is nothing to learn from. So neither side can run away.
    """

    def __init__(self, components: RunComponents, collector: Collector, tasks: TaskStream) -> None:
        self.components, self.collector, self.tasks = components, collector, tasks
        config = components.config
        rounds = config.rollout.dynamic_rounds
        self.rounds = rounds or (DYNAMIC_ROUNDS if components.preset.dynamic_sampling else 1)
        self.ahead = config.rollout.staleness
        self.window = StalenessWindow(collector, self._job, self.ahead, config.train.steps)
        self._cursors: dict[int, int] = {}

    def take(self, step: int) -> StepRollouts:
        """The step's episodes; step 1 is the first."""
        started = time.perf_counter()
        waiting = float(self.window.num_done)
        if self.rounds == 1:
            episodes, flat = self.window.take(step), []
            cursor = self._cursors.pop(step)
        else:
            wanted = self.components.config.rollout.tasks
            episodes, flat = collect_informative(
                self.tasks,
                wanted,
                lambda some: self.collector.submit(self._of(step, some)).result(),
                self.rounds,
            )
            cursor = self.tasks.cursor
        seconds = time.perf_counter() - started
        numbers = self.collector.counts()
        if self.ahead:
            numbers |= {"rollout/steps_waiting": waiting}
        return StepRollouts(episodes, len(flat), seconds, cursor, numbers)

    def _job(self, step: int) -> RolloutRequest:
        some = [next(self.tasks) for _ in range(self.components.config.rollout.tasks)]
        self._cursors[step] = self.tasks.cursor
        return self._of(step, some)

    def _of(self, step: int, tasks: Sequence[Task]) -> RolloutRequest:
        salt = self.components.config.run.seed * TRAIN_SEEDS + step
        return RolloutRequest(tasks, f"the episodes of step {step}", step=step, salt=salt)
