"""Scores on held-out tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graft.rollout.branches.branch import independent
from graft.rollout.collect import collect
from graft.rollout.setup import RolloutSetup
from graft.types import Episode, Task


@dataclass(frozen=True, slots=True)
class HeldOutScore:
    """Means over all attempts; `failed` attempts (a broken tool or env) count as reward 0."""

    reward: float
    tool_rate: float
    tool_calls: float
    reward_with_tool: float
    failed: float
    episodes: list[Episode]

    @property
    def rewards(self) -> list[list[float]]:
        """Of every attempt, task by task."""
        return [
            [leaf.reward if leaf.status.is_trainable else 0.0 for leaf in episode.leaves]
            for episode in self.episodes
        ]


def evaluate(
    tasks: Sequence[Task],
    setup: RolloutSetup,
    *,
    temperature: float,
    samples: int = 1,
    concurrency: int = 256,
) -> HeldOutScore:
    """Attempt each task `samples` times; temperature 0 is greedy."""
    setup = replace(setup, sampling=replace(setup.sampling, temperature=temperature))
    return score_of(collect(tasks, setup, independent(samples), concurrency=concurrency))


def score_of(episodes: list[Episode]) -> HeldOutScore:
    """The means of attempts that somebody has made."""
    leaves = [leaf for episode in episodes for leaf in episode.leaves]
    called = [leaf for leaf in leaves if leaf.metrics.get("tool_calls", 0.0) > 0]
    count = max(len(leaves), 1)
    return HeldOutScore(
        reward=sum(leaf.reward for leaf in leaves if leaf.status.is_trainable) / count,
        tool_rate=len(called) / count,
        tool_calls=sum(leaf.metrics["tool_calls"] for leaf in called) / count,
        reward_with_tool=sum(leaf.reward for leaf in called) / max(len(called), 1),
        failed=sum(not leaf.status.is_trainable for leaf in leaves) / count,
        episodes=episodes,
    )
