"""A step in numbers: what the attempts earned, how long they were, what they called, why they failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

import torch

from graft.rewards.weighted import METRIC
from graft.rollout.batching import trajectories_of
from graft.rollout.collect import is_flat
from graft.types import Author, Episode, Leaf, Status


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
            for row in trajectories_of(episodes)
        ]
    )
    calls = torch.tensor([leaf.metrics.get("tool_calls", 0.0) for leaf in leaves])
    failures = sum(leaf.metrics.get("tool_failures", 0.0) for leaf in leaves)
    turns = [leaf.metrics.get("turns", 0.0) for leaf in leaves]
    parts = sorted({n for leaf in ended for n in leaf.metrics if n.startswith(METRIC)})
    by_tool = sorted({n for leaf in leaves for n in leaf.metrics if n.startswith("tools/")})
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(spreads.mean()),
        **{n: fmean(leaf.metrics.get(n, 0.0) for leaf in ended) for n in parts},
        "frac_reward_zero_std": sum(map(is_flat, episodes)) / len(episodes),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": _share(leaf.status == "truncated" for leaf in leaves),
        "rollout/turns": sum(turns) / len(turns),
        "rollout/failed": 1.0 - len(ended) / len(leaves),
        "rollout/no_room": _share(_had_no_room(leaf) for leaf in leaves),
        "tools/rate": float((calls > 0).float().mean()),
        "tools/call_frequency": float(calls.mean()),
        "tools/failure_frequency": failures / max(float(calls.sum()), 1.0),
        **{n: sum(leaf.metrics.get(n, 0.0) for leaf in leaves) / len(leaves) for n in by_tool},
        "tools/calls_made": _calls_made(episodes),
        **_describe_forks(episodes),
        **_describe_twins(twins, len(leaves), episodes),
    }


def _calls_made(episodes: Sequence[Episode]) -> float:
    """Of the step, in all, refusals aside; a call that several attempts go through was made once."""
    spans = (span for episode in episodes for span in episode.spans)
    return float(sum(span.info.get("tool_calls", 0) for span in spans))


def _describe_forks(episodes: Sequence[Episode]) -> dict[str, float]:
    """Of attempts that share more than their prompt: how they forked, and how much that saved."""
    rows = [row for episode in episodes for row in episode.trajectories()]
    spans = {id(span): span for row in rows for span in row.spans}.values()
    decided = [span.info for span in spans if "entropy_change" in span.info]
    if not decided:
        return {}
    roots = sum(s.parent == 0 and s.author is Author.POLICY for s in spans)
    said = sum(len(span) for span in spans if span.author is Author.POLICY)
    in_rows = sum(len(s) for row in rows for s in row.spans if s.author is Author.POLICY)
    forks = sum(info["forks"] for info in decided)
    return {
        "branch/roots": roots / len(episodes),
        "branch/rate": forks / len(decided),
        "branch/forks": forks / len(episodes),
        "branch/entropy_change": sum(info["entropy_change"] for info in decided) / len(decided),
        "branch/shared_tokens": 1.0 - said / max(in_rows, 1),
    }


def _had_no_room(leaf: Leaf) -> bool:
    """Whether its prompt filled the context, so that it never spoke."""
    return leaf.status is Status.TRUNCATED and not leaf.metrics.get("turns", 0.0)


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


def commonest_failure(episodes: Sequence[Episode], none: str = "no reason was recorded") -> str:
    """The reason that most failed attempts give; `none` where there is none."""
    reasons = failures(episodes)
    return max(set(reasons), key=reasons.count) if reasons else none


def missing(episodes: Sequence[Episode], samples: int) -> float:
    """Share of the attempts that a branch should have grown and has not. A task that could not be posed
    has one leaf, which says why, and is not the branch's doing."""
    grown = [[leaf for leaf in episode.leaves if leaf.twin is None] for episode in episodes]
    posed = [leaves for leaves in grown if any(leaf.metrics for leaf in leaves) or not leaves]
    lacking = sum(max(samples - len(leaves), 0) for leaves in posed)
    return lacking / max(samples * len(posed), 1)


def why_it_died(episodes: Sequence[Episode]) -> str:
    """Name the commonest reason."""
    reasons = failures(episodes)
    common = commonest_failure(episodes)
    count = sum(len(episode.leaves) for episode in episodes)
    return (
        f"none of the {count} attempts of this step came to its end; {len(reasons)} failed, mostly: "
        f"{common}. Nothing was trained; the last "
        "checkpoint is intact. Repair the environment or tool and run the same command again; errors.log in "
        "the run's folder has the traceback, GRAFT_DEBUG=1 prints it"
    )
