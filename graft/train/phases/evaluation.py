"""Scores on held-out tasks during a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance

from graft.rollout.branches.branch import PASS_AT
from graft.rollout.collector import RolloutRequest
from graft.train.errors import RunStopped
from graft.train.phases.context import RunContext
from graft.train.rollouts.episode_groups import groups_of
from graft.train.step_metrics import commonest_failure
from graft.types import Episode, Sampling, Status, Task

SOLVED = 1.0 - 1e-9
"""The least reward of a right attempt; a sum that should be 1 may have been rounded."""


@dataclass(frozen=True, slots=True)
class HeldOutScore:
    """Means over tasks of the means over their attempts; `failed` ones (a broken tool or env) count as 0."""

    reward: float
    tool_rate: float
    reward_with_tool: float
    failed: float
    episodes: list[Episode]

    @classmethod
    def of(cls, episodes: list[Episode]) -> HeldOutScore:
        leaves = [leaf for episode in episodes for leaf in episode.leaves]
        called = [leaf for leaf in leaves if leaf.metrics.get("tool_calls", 0.0) > 0]
        count = max(len(leaves), 1)
        return cls(
            reward=mean_reward(episodes),
            tool_rate=len(called) / count,
            reward_with_tool=sum(leaf.reward for leaf in called) / max(len(called), 1),
            failed=sum(not leaf.status.is_trainable for leaf in leaves) / count,
            episodes=episodes,
        )


def mean_reward(episodes: Sequence[Episode]) -> float:
    """The mean over tasks of the mean over attempts."""
    means = task_means(episodes)
    return sum(means) / max(len(means), 1)


def task_means(episodes: Sequence[Episode]) -> list[float]:
    """The mean reward of each task's attempts; failed ones count as 0."""
    return [
        sum(leaf.reward for leaf in episode.leaves if leaf.status.is_trainable)
        / max(len(episode.leaves), 1)
        for episode in episodes
    ]


def standard_error(episodes: Sequence[Episode], envs: Sequence[str]) -> float | None:
    """How far the score of `overall` would scatter with other tasks; None if an environment has one task.

    rewards 1, 1, 0, 0 of four tasks: the variance is 1/3, the standard error sqrt(1/3 / 4) = 0.289
    """
    by_env = [task_means(own) for own in by_environment(episodes, envs)]
    if any(len(means) < 2 for means in by_env):
        return None
    return math.sqrt(sum(variance(means) / len(means) for means in by_env)) / len(by_env)


def evaluate_held_out(run: RunContext, when: str) -> dict[str, float]:
    """The scores of the run's held-out tasks, sampled and greedy; of a mix also part by part."""
    config = run.config
    if not config.run.eval_tasks:
        return {}
    tasks = run.components.held_out_tasks(config.run.eval_tasks)
    run.display.note(f"evaluating {len(tasks)} held-out tasks ({when})")
    clock = run.clock("eval")
    drawn = run.components.held_out.sampling
    sampled = None
    if drawn.temperature:
        sampled = attempt_held_out(run, tasks, drawn, config.eval.samples or None)
    greedy = attempt_held_out(run, tasks, replace(drawn, temperature=0.0))
    sampled = sampled or greedy
    clock()
    run.episodes = sampled.episodes
    if sampled.failed:
        reason = commonest_failure(sampled.episodes)
        run.display.note(f"{sampled.failed:.0%} of the held-out attempts failed, mostly: {reason}")
    envs = [item.label for item in config.held_out_envs]
    return {
        **overall(lambda own: {"sampled": mean_reward(own)}, sampled.episodes, envs),
        **overall(lambda own: {"greedy": mean_reward(own)}, greedy.episodes, envs),
        "tool_rate": sampled.tool_rate,
        **overall(passed, sampled.episodes, envs),
        **by_group(sampled.episodes, greedy.episodes, envs),
    }


def precision(run: RunContext, when: str) -> dict[str, float | int | None]:
    """{"tasks": 200, "before": 0.03}: the standard error of the sampled score that was just measured."""
    envs = [item.label for item in run.config.held_out_envs]
    return {"tasks": len(run.episodes), when: standard_error(run.episodes, envs)}


def by_group(
    sampled: Sequence[Episode], greedy: Sequence[Episode], envs: Sequence[str]
) -> dict[str, float]:
    """The scores of each environment and data source, where there are several; pass@k of every source."""
    found: dict[str, float] = {}
    for name, episodes in {"sampled": sampled, "greedy": greedy}.items():
        for label, own in groups_of(episodes, envs).items():
            found[f"{label}/{name}"] = mean_reward(own)
    for label, own in groups_of(sampled, envs, every_source=True).items():
        found |= {f"{label}/{name}": value for name, value in passed(own).items()}
    return found


def passed(episodes: Sequence[Episode]) -> dict[str, float]:
    """pass@k: the share of the tasks with k attempts that one of them solves, with a reward of 1.

    Tasks of one attempt have one only if their row asks for it.
    """
    solved: dict[int, list[bool]] = {}
    for episode in episodes:
        count = len(episode.leaves)
        if count > 1 or episode.task.meta.get(PASS_AT):
            rewards = [leaf.reward for leaf in episode.leaves if leaf.status.is_trainable]
            solved.setdefault(count, []).append(max(rewards, default=0.0) >= SOLVED)
    return {f"pass@{k}": sum(flags) / len(flags) for k, flags in sorted(solved.items())}


def overall(
    scores: Callable[[Sequence[Episode]], Mapping[str, float]],
    episodes: Sequence[Episode],
    envs: Sequence[str],
) -> dict[str, float]:
    """Means of the environments' scores, so that each counts the same, whatever its number of tasks."""
    found = [scores(own) for own in by_environment(episodes, envs)]
    names = dict.fromkeys(name for one in found for name in one)
    return {name: fmean(one[name] for one in found if name in one) for name in names}


def by_environment(episodes: Sequence[Episode], envs: Sequence[str]) -> list[Sequence[Episode]]:
    if len(envs) < 2:
        return [episodes]
    return [[episode for episode in episodes if episode.task.env == env] for env in envs]


def attempt_held_out(
    run: RunContext, tasks: Sequence[Task], sampling: Sampling, samples: int | None = 1
) -> HeldOutScore:
    """Attempt each task `samples` times; None: as often as its row asks for."""
    name = f"{len(tasks)} held-out episodes"
    request = RolloutRequest(tasks, name, held_out=True, samples=samples, sampling=sampling)
    score = HeldOutScore.of(run.collector.submit(request).result())
    run.journal.failures(name, score.episodes)
    leaves = [leaf for episode in score.episodes for leaf in episode.leaves]
    if all(leaf.status is Status.ENGINE_ERROR for leaf in leaves):  # a score of nothing
        raise RunStopped(
            f"the engine completed none of {name}, mostly: {commonest_failure(score.episodes)}. The "
            "last checkpoint is intact; run the same command again once the engine is back"
        )
    return score
