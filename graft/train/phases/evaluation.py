"""Scores on held-out tasks during a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graft.rollout.collector import RolloutRequest
from graft.train.phases.context import RunContext
from graft.train.run_dir.folder import RunStopped
from graft.train.step_metrics import commonest_failure
from graft.train.tasks import held_out_tasks
from graft.types import Episode, Status, Task


@dataclass(frozen=True, slots=True)
class HeldOutScore:
    """Means over all attempts; `failed` attempts (a broken tool or env) count as reward 0."""

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
            reward=sum(leaf.reward for leaf in leaves if leaf.status.is_trainable) / count,
            tool_rate=len(called) / count,
            reward_with_tool=sum(leaf.reward for leaf in called) / max(len(called), 1),
            failed=sum(not leaf.status.is_trainable for leaf in leaves) / count,
            episodes=episodes,
        )


def evaluate_held_out(run: RunContext, when: str) -> dict[str, float]:
    """The scores of the run's held-out tasks, sampled and greedy."""
    config = run.config
    if not config.run.eval_tasks:
        return {}
    run.display.note(f"evaluating {config.run.eval_tasks} held-out tasks ({when})")
    tasks = held_out_tasks(config.task.env, config.run.eval_tasks)
    clock = run.clock("eval")
    sampled = attempt_held_out(run, tasks, config.rollout.temperature)
    greedy = attempt_held_out(run, tasks, 0.0)
    clock()
    run.episodes = sampled.episodes
    if sampled.failed:
        reason = commonest_failure(sampled.episodes)
        run.display.note(f"{sampled.failed:.0%} of the held-out attempts failed, mostly: {reason}")
    return {"sampled": sampled.reward, "greedy": greedy.reward, "tool_rate": sampled.tool_rate}


def attempt_held_out(run: RunContext, tasks: Sequence[Task], temperature: float) -> HeldOutScore:
    """Attempt each task once."""
    name = f"{len(tasks)} held-out episodes"
    request = RolloutRequest(tasks, name, held_out=True, temperature=temperature)
    score = HeldOutScore.of(run.collector.submit(request).result())
    run.journal.failures(name, score.episodes)
    leaves = [leaf for episode in score.episodes for leaf in episode.leaves]
    if all(leaf.status is Status.ENGINE_ERROR for leaf in leaves):  # a score of nothing
        raise RunStopped(
            f"the engine completed none of {name}, mostly: {commonest_failure(score.episodes)}. The "
            "last checkpoint is intact; run the same command again once the engine is back"
        )
    return score
