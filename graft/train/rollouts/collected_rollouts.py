"""The source of a step's episodes: a stream of tasks, and a collector that attempts them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from graft.rollout.collect import collect_informative
from graft.rollout.collector import Collector, RolloutRequest, StalenessWindow
from graft.rollout.outcomes import missing_share, unsampled
from graft.train.algorithm import rounds_of
from graft.train.components import RunComponents
from graft.train.rollouts.draft_metrics import DraftMetrics
from graft.train.rollouts.episode_groups import rewards_by_group
from graft.train.rollouts.step_rollouts import StepRollouts
from graft.train.sft_dataset import Examples, in_order, recorded
from graft.train.tasks import TRAIN_SEEDS, TaskStream
from graft.types import Episode, Task


class CollectedRollouts:
    """The episodes of each step, and the way of new weights to their engine.

    With `rollout.staleness` the collector runs ahead of the learner, by that number of steps at most,
    and the learner waits where the next step's episodes are not complete.
    """

    def __init__(self, components: RunComponents, collector: Collector, tasks: TaskStream) -> None:
        self.components, self.collector, self.tasks = components, collector, tasks
        config = components.config
        self.rounds = rounds_of(config, components.algo.preset)
        self.staleness = config.rollout.staleness
        self.window = StalenessWindow(collector, self._request, self.staleness, config.train.steps)
        self._cursors: dict[int, int] = {}
        self.drafts = DraftMetrics(components.engine)
        self.num_attempted, self.rows = self._mixture()

    def take(self, step: int) -> StepRollouts:
        """The step's episodes; step 1 is the first."""
        started = time.perf_counter()
        num_waiting = float(self.window.num_done)
        config = self.components.config
        rollout = config.rollout
        if self.rounds == 1:
            episodes, flat = self.window.take(step), []
            cursor = self._cursors.pop(step)
        else:
            episodes, flat = collect_informative(
                self.tasks,
                rollout.tasks,
                lambda some: self.collector.submit(self._request_of(step, some)).result(),
                self.rounds,
            )
            cursor = self.tasks.cursor
        seconds = time.perf_counter() - started
        metrics = {
            "rollout/missing": missing_share(episodes, rollout.samples),
            **rewards_by_group(episodes, [item.label for item in config.task.envs]),
            **self.collector.counts(),
            **self.drafts.take(),
        }
        if self.staleness:
            metrics["rollout/steps_waiting"] = num_waiting
        metrics["sampling/entropy_top_k"] = float(self.components.entropy_top_k)
        if not self.staleness:
            self.components.rest_engine()
        if self.rows is not None:
            episodes = episodes + [unsampled(row, step - 1) for row in self.rows(step)]
        return StepRollouts(episodes, len(flat), seconds, cursor, self.staleness > 0, metrics)

    def _mixture(self) -> tuple[int, Examples | None]:
        """Tasks of a step that are attempted, and the rows of distill.data in place of the others."""
        config = self.components.config
        tasks, distill = config.rollout.tasks, config.distill
        attempted = max(round(distill.on_policy * tasks), 1) if distill.data else tasks
        if attempted == tasks:
            return tasks, None
        rows = recorded(self.components, distill.data)
        count = (tasks - attempted) * config.rollout.samples
        return attempted, in_order(rows, count, config.run.seed, None)

    def restore(self, ahead: Mapping[int, list[Episode]]) -> None:
        """Begin with the steps that a checkpoint has; their tasks are not drawn again."""
        for step in sorted(ahead):
            self._draw_tasks(step)
        self.window.restore(ahead)

    def publish(self, version: int) -> float:
        """Give the learner's weights to the engines that sample; the seconds that took."""
        started = time.perf_counter()
        self.collector.load(self.components.weights_to_publish(), version)
        return time.perf_counter() - started

    def _request(self, step: int) -> RolloutRequest:
        return self._request_of(step, self._draw_tasks(step))

    def _draw_tasks(self, step: int) -> list[Task]:
        some = [next(self.tasks) for _ in range(self.num_attempted)]
        self._cursors[step] = self.tasks.cursor
        return some

    def _request_of(self, step: int, tasks: Sequence[Task]) -> RolloutRequest:
        salt = self.components.config.run.seed * TRAIN_SEEDS + step
        return RolloutRequest(tasks, f"the episodes of step {step}", step=step, salt=salt)
