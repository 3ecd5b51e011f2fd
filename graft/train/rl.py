"""One step of RL: rollouts, batch, advantages, update, publish.

Logging, evaluation, checkpoints and alarms are hooks beside the step (`train/phases/step_hooks.py`);
the metrics are in `step_metrics.py`. The same step serves one process, torchrun and Ray: they differ in
the collector behind `source` and in the process group of the learner.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from graft.algos.algorithm import Algorithm
from graft.algos.batch import Batch
from graft.rollout.batching import to_batch, trajectories_of
from graft.train.learner import Learner
from graft.train.reference_sync import sync_reference
from graft.train.rollouts.step_rollouts import StepRollouts
from graft.train.step_metrics import refuse_unusable, step_metrics


@dataclass(slots=True)
class StepResult:
    """What a step learned."""

    metrics: dict[str, float]
    batch: Batch
    """With its trajectories and their advantages."""
    logprobs: Tensor | None
    """The learner's own before its first update, [N, T]; None where it does not keep them."""


class RolloutSource(Protocol):
    """The source of episodes, and the place that new weights go to."""

    def take(self, step: int) -> StepRollouts:
        """The step's episodes: made here, in the background or on workers."""
        ...

    def publish(self, version: int) -> float:
        """Give the learner's weights to the engines that sample; the seconds that took."""
        ...


class StepHooks(Protocol):
    """What a run does beside a step."""

    def on_collect(self, step: int) -> None: ...
    def learning(self, step: int, rollouts: StepRollouts) -> AbstractContextManager[None]: ...
    def on_learned(self, step: int) -> None: ...
    def on_published(self, step: int, rollouts: StepRollouts, result: StepResult) -> None: ...


def train_step(
    step: int, source: RolloutSource, algo: Algorithm, learner: Learner, hooks: StepHooks
) -> None:
    """Collect, learn, publish."""
    hooks.on_collect(step)
    rollouts = source.take(step)  # tasks -> trees: here, in the background, on workers
    with hooks.learning(step, rollouts):
        result = learn(step, rollouts, algo, learner)
        hooks.on_learned(step)
        # nothing to send where tensors are shared
        result.metrics["time/sync"] = source.publish(step)
        hooks.on_published(step, rollouts, result)


def learn(step: int, rollouts: StepRollouts, algo: Algorithm, learner: Learner) -> StepResult:
    """Batch, credit, update."""
    started = time.perf_counter()
    trajectories = trajectories_of(rollouts.episodes)
    refuse_unusable(rollouts.episodes, trajectories)
    batch = to_batch(trajectories)  # [N, T], shared spans known
    batch = learner.annotate(batch)  # reference and old log-probs, values: if needed
    batch = algo.shape(batch)
    advantages = algo.credit(batch.zeros(), batch)
    returns = None if algo.returns is None else algo.returns(batch.zeros(), batch)
    batch = algo.prepare(batch.replace(advantages=advantages, returns=returns))
    updated = learner.update(batch)  # pack, forward once per unique token, step
    updated |= algo.adapt(batch, updated)
    sync_reference(learner, step)
    algo.settle(rollouts.episodes, batch)
    seconds = time.perf_counter() - started
    metrics = step_metrics(step, rollouts, batch, updated, seconds)
    # with several updates a batch they were computed before the first; else by the only one
    has_own = batch.old_logprobs is not None and not learner.old_is_engine
    logprobs = batch.old_logprobs if has_own else learner.logprobs
    return StepResult(metrics, batch, logprobs)
