"""The loop: tasks -> episodes -> batch -> advantages -> update -> the engine's next version."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from graft.protocols import Stateful
from graft.rollout.batching import rows_of, to_batch
from graft.rollout.collect import collect, collect_informative, is_flat
from graft.train.folder import RunStopped
from graft.train.learner import Learner
from graft.train.setup import Parts
from graft.types import Author, Episode, Leaf, Status, Task

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
    return {
        **describe(episodes),
        "advantages/std": float(advantages[batch.mask].std(correction=0))
        if batch.num_tokens
        else 0.0,
        "rollout/set_aside": float(rollouts.set_aside),
        **updated,
        "num_tokens": float(sampled),
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


def describe(episodes: Sequence[Episode]) -> dict[str, float]:
    """Rewards, lengths and tool use of a step, in the names people look for."""
    everyone = [leaf for episode in episodes for leaf in episode.leaves]
    leaves = [leaf for leaf in everyone if leaf.twin is None]  # what the policy did by itself
    twins = [leaf for leaf in everyone if leaf.twin is not None]
    ended = [leaf for leaf in leaves if _has_reward(leaf)]
    rewards = torch.tensor([leaf.reward for leaf in ended])
    groups = [[x.reward for x in e.leaves if x.twin is None and _has_reward(x)] for e in episodes]
    spreads = torch.tensor([torch.tensor(g).std(correction=0) for g in groups if g])
    lengths = torch.tensor(
        [
            float(sum(len(s) for s in row.spans if s.author is Author.POLICY))
            for row in rows_of(episodes)
        ]
    )
    calls = torch.tensor([leaf.metrics.get("tool_calls", 0.0) for leaf in leaves])
    failures = sum(leaf.metrics.get("tool_failures", 0.0) for leaf in leaves)
    turns = [leaf.metrics.get("turns", 0.0) for leaf in leaves]
    by_tool = sorted({n for leaf in leaves for n in leaf.metrics if n.startswith("tools/")})
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(spreads.mean()),
        "frac_reward_zero_std": sum(map(is_flat, episodes)) / len(episodes),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": _share(leaf.status == "truncated" for leaf in leaves),
        "rollout/turns": sum(turns) / len(turns),
        "rollout/failed": 1.0 - len(ended) / len(leaves),
        "tools/rate": float((calls > 0).float().mean()),
        "tools/call_frequency": float(calls.mean()),
        "tools/failure_frequency": failures / max(float(calls.sum()), 1.0),
        **{n: sum(leaf.metrics.get(n, 0.0) for leaf in leaves) / len(leaves) for n in by_tool},
        **_describe_twins(twins, len(leaves), episodes),
    }


def _has_reward(leaf: Leaf) -> bool:
    return leaf.status.is_trainable or leaf.status is Status.REPLACED


def _describe_twins(
    twins: Sequence[Leaf], attempts: int, episodes: Sequence[Episode]
) -> dict[str, float]:
    """Of counterfactual attempts: how many there are, and what forcing a call has brought."""
    if not twins:
        return {}
    gains = [
        leaf.reward - episode.leaves[leaf.twin].reward
        for episode in episodes
        for leaf in episode.leaves
        if leaf.twin is not None
    ]
    return {
        "training/rewrites/mean": len(twins) / attempts,
        "training/rewrites/gain": sum(gains) / len(gains),
    }


def _share(flags: Iterator[bool]) -> float:
    listed = list(flags)
    return sum(listed) / max(len(listed), 1)


def is_dead(episodes: Sequence[Episode]) -> bool:
    """True if many attempts failed and not one came to its end: a tool or environment is down."""
    statuses = [leaf.status for episode in episodes for leaf in episode.leaves]
    failed = sum(not status.is_trainable and status != "replaced" for status in statuses)
    return Status.DONE not in statuses and failed * 4 >= len(statuses)


def failures(episodes: Sequence[Episode]) -> list[str]:
    return [s.info["error"] for e in episodes for s in e.spans if "error" in s.info]


def commonest_failure(episodes: Sequence[Episode]) -> str:
    reasons = failures(episodes)
    return max(set(reasons), key=reasons.count) if reasons else "no reason was recorded"


def why_it_died(episodes: Sequence[Episode]) -> str:
    """Name the commonest reason."""
    reasons = failures(episodes)
    common = commonest_failure(episodes)
    count = sum(len(episode.leaves) for episode in episodes)
    return (
        f"none of the {count} attempts of this step came to its end; {len(reasons)} failed, mostly: "
        f"{common}. Nothing was trained; the last "
        "checkpoint is intact. Repair the environment or tool and run the same command again"
    )
