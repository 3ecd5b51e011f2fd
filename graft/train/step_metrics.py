"""The metrics of a step: rewards, lengths, tool use, failures, staleness, tokens and times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import torch

from graft.algos.batch import Batch
from graft.algos.kl import compared, teacher_gap
from graft.rewards.weighted import METRIC
from graft.rollout.batching import trajectories_of
from graft.rollout.outcomes import is_flat, is_unsampled
from graft.train.errors import RunStopped
from graft.train.monitor.printable import visible
from graft.train.rollouts.episode_groups import has_reward
from graft.train.rollouts.step_rollouts import StepRollouts
from graft.types import Author, Episode, Leaf, Span, Status, Trajectory

MAX_OUTPUT_LINES, MAX_LINE = 6, 240
"""Lines that are shown of what a crashed program wrote, and characters of a line."""


def step_metrics(
    step: int,
    rollouts: StepRollouts,
    batch: Batch,
    updated: Mapping[str, float],
    seconds: float,
) -> dict[str, float]:
    """All metrics of a step that took `seconds` to learn; `updated` are the learner's."""
    episodes = _attempted(rollouts.episodes)
    sampled = sum(_num_sampled(episode.spans) for episode in episodes)
    spans = {id(span): span for row in batch.trajectories for span in row.spans}.values()
    age = (step - 1 - batch.versions[batch.mask]).float()
    assert batch.advantages is not None
    std = float(batch.advantages[batch.mask].std(correction=0)) if batch.num_tokens else 0.0
    return {
        **describe(episodes),
        **rollouts.metrics,
        "advantages/std": std,
        "rollout/set_aside": float(rollouts.set_aside),
        "staleness/mean": float(age.mean()) if len(age) else 0.0,
        "staleness/max": float(age.max()) if len(age) else 0.0,
        **updated,
        **_distance(batch),
        "num_tokens": float(sampled),
        "num_trained_tokens": float(sum(sum(span.mask) for span in spans)),
        "num_forward_tokens": float(sum(map(len, spans))),
        **_times(sampled, rollouts, seconds),
        "time/learn": seconds,
    }


def _distance(batch: Batch) -> dict[str, float]:
    """The distance of the policy from its teacher, by the tokens that the policy sampled."""
    if batch.has_teacher is None:
        return {}
    found = {"distill/rows": float(batch.has_teacher.float().mean())}
    if batch.teacher_logprobs is not None and (held := compared(batch)).any():
        found["distill/kl"] = -float(teacher_gap(batch)[held].mean())
    return found


def _times(sampled: int, rollouts: StepRollouts, seconds: float) -> dict[str, float]:
    """The times of a step that collected its episodes; from Python the learner is given them: no times."""
    waited = rollouts.seconds
    if not waited:
        return {}
    return {
        "tokens_per_second": sampled / (waited + (seconds if rollouts.is_async else 0.0)),
        "step_time": waited + seconds,
        "time/rollout": waited,
    }


def _attempted(episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes without the recorded rows that are learned beside attempts."""
    return [episode for episode in episodes if not is_unsampled(episode)]


def describe(episodes: Sequence[Episode]) -> dict[str, float]:
    """Rewards, lengths and tool use of a step's attempts."""
    episodes = _attempted(episodes)
    all_leaves = [leaf for episode in episodes for leaf in episode.leaves]
    leaves = [leaf for leaf in all_leaves if leaf.is_attempt]  # the policy's own attempts
    twins = [leaf for leaf in all_leaves if leaf.twin is not None]
    ended = [leaf for leaf in leaves if has_reward(leaf)]
    rewards = torch.tensor([leaf.reward for leaf in ended])
    groups = [
        [x.reward for x in acted if x.twin is None and has_reward(x) and x.seat == seat]
        for acted in ([x for x in e.leaves if x.has_acted] for e in episodes)
        for seat in {x.seat: None for x in acted}
    ]
    spreads = torch.tensor([torch.tensor(g).std(correction=0) for g in groups if g])
    rows = trajectories_of(episodes)
    lengths = torch.tensor([float(_num_sampled(row.spans)) for row in rows])
    calls = torch.tensor([leaf.metrics.get("tool_calls", 0.0) for leaf in leaves])
    failures = sum(leaf.metrics.get("tool_failures", 0.0) for leaf in leaves)
    turns = [leaf.metrics.get("turns", 0.0) for leaf in leaves]
    components = sorted({n for leaf in ended for n in leaf.metrics if n.startswith(METRIC)})
    by_tool = sorted(
        {n for leaf in leaves for n in leaf.metrics if n.startswith(("tools/", "agent/"))}
    )
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(spreads.mean()),
        **{n: fmean(leaf.metrics.get(n, 0.0) for leaf in ended) for n in components},
        "frac_reward_zero_std": sum(map(is_flat, episodes)) / len(episodes),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": _share([leaf.status == "truncated" for leaf in leaves]),
        "rollout/turns": sum(turns) / len(turns),
        "rollout/failed": 1.0 - len(ended) / len(leaves),
        "rollout/no_room": _share([_had_no_room(leaf) for leaf in leaves]),
        "tools/rate": float((calls > 0).float().mean()),
        "tools/call_frequency": float(calls.mean()),
        "tools/failure_frequency": failures / max(float(calls.sum()), 1.0),
        **{n: sum(leaf.metrics.get(n, 0.0) for leaf in leaves) / len(leaves) for n in by_tool},
        # without refused calls; a call that several attempts share counts once
        "tools/calls_made": float(
            sum(s.info.get("tool_calls", 0) for e in episodes for s in e.spans)
        ),
        **_describe_seats(ended),
        **_describe_forks(episodes),
        **_describe_twins(twins, len(leaves), episodes),
    }


def _describe_seats(ended: Sequence[Leaf]) -> dict[str, float]:
    """Rewards by seat, where several agents play: the mean over all of a zero-sum game is 0."""
    seats = sorted({leaf.seat for leaf in ended if leaf.seat})
    return {f"seat/{s}/reward": fmean(x.reward for x in ended if x.seat == s) for s in seats}


def _describe_forks(episodes: Sequence[Episode]) -> dict[str, float]:
    """Describe how attempts that share more than their prompt forked, and the share of tokens saved."""
    trajectories = [row for episode in episodes for row in episode.trajectories()]
    spans = {id(span): span for row in trajectories for span in row.spans}.values()
    decided = [span.info for span in spans if "entropy_change" in span.info]
    if not decided:
        return {}
    leaves = [leaf for episode in episodes for leaf in episode.leaves]
    if any("agent/calls" in leaf.metrics for leaf in leaves):
        roots = sum(not leaf.metrics.get("agent/replayed") for leaf in leaves)
    else:
        roots = sum(s.parent == 0 and s.author is Author.POLICY for s in spans)
    sampled = _num_sampled(spans)
    in_rows = sum(_num_sampled(row.spans) for row in trajectories)
    forks = sum(info["forks"] for info in decided)
    return {
        "branch/roots": roots / len(episodes),
        "branch/rate": forks / len(decided),
        "branch/forks": forks / len(episodes),
        "branch/entropy_change": sum(info["entropy_change"] for info in decided) / len(decided),
        "branch/shared_tokens": 1.0 - sampled / max(in_rows, 1),
    }


def _num_sampled(spans: Iterable[Span]) -> int:
    return sum(len(span) for span in spans if span.author is Author.POLICY)


def _had_no_room(leaf: Leaf) -> bool:
    """Whether its prompt filled the context, so that no token could be sampled."""
    return leaf.status is Status.TRUNCATED and not leaf.metrics.get("turns", 0.0)


def _describe_twins(
    twins: Sequence[Leaf], attempts: int, episodes: Sequence[Episode]
) -> dict[str, float]:
    """The number of counterfactual attempts, and their gain in reward."""
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


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / max(len(flags), 1)


def is_dead(statuses: Iterable[str]) -> bool:
    """Whether many attempts failed and none was completed: a tool or environment is down."""
    counted = Counter(map(Status, statuses))
    crashed = counted[Status.CRASHED]
    fine = sum(count for status, count in counted.items() if status.is_trainable) - crashed
    if crashed and not fine:  # each has a reward, and nothing tells one from another
        return True
    failed = counted.total() - fine - crashed - counted[Status.REPLACED] - counted[Status.BASELINE]
    return not counted[Status.DONE] and failed * 4 >= max(counted.total(), 1)


def commonest_failure(episodes: Sequence[Episode], none: str = "no reason was recorded") -> str:
    """The most frequent reason of failed attempts; `none` where there is none."""
    reasons = _failures(episodes)
    return max(set(reasons), key=reasons.count) if reasons else none


def is_failed(status: Status) -> bool:
    return not status.is_trainable or status is Status.CRASHED


def _failures(episodes: Sequence[Episode]) -> list[str]:
    """The reason of each failed attempt: in its leaf, where a program made it, else in one of its spans."""
    found: list[str] = []
    for episode in episodes:
        failed = [leaf for leaf in episode.leaves if is_failed(leaf.status)]
        told = [leaf.info["error"] for leaf in failed if "contexts" in leaf.info]
        found += told or [span.info["error"] for span in episode.spans if "error" in span.info]
    return found


def _traceback_place(episodes: Sequence[Episode]) -> str:
    """Say where the tracebacks are, if there are any: a program that failed, or a deadline, leaves none."""
    if not any("traceback" in span.info for episode in episodes for span in episode.spans):
        return ""
    return "; GRAFT_DEBUG=1 prints the traceback, span.info['traceback'] has it"


def explain_dead(episodes: Sequence[Episode]) -> str:
    """Why no attempt can be learned from, where a tool or environment is down; else ""."""
    statuses = [leaf.status for episode in episodes for leaf in episode.leaves]
    if not is_dead(statuses):
        return ""
    return (
        f"none of the {len(statuses)} attempts of this step came to its end; {len(_failures(episodes))} "
        f"failed, mostly: {commonest_failure(episodes)}"
    )


def _last_output(episodes: Sequence[Episode]) -> str:
    """The last lines that a crashed program wrote, as they stand; "" without one."""
    failed = (leaf for e in episodes for leaf in e.leaves if is_failed(leaf.status))
    written = next((text for leaf in failed if (text := leaf.info.get("output"))), "")
    lines = str(written).strip().splitlines()[-MAX_OUTPUT_LINES:]
    return "".join(f"\n  | {visible(line)[:MAX_LINE]}" for line in lines)


def refuse_unusable(episodes: Sequence[Episode], trajectories: Sequence[Trajectory]) -> None:
    """Stop a run whose step has nothing to learn from."""
    if reason := explain_dead(episodes):
        raise RunStopped(
            f"{reason}. Nothing was trained, and saved files are intact. Repair the environment, tool or "
            f"agent and try again{_traceback_place(episodes)}{_last_output(episodes)}"
        )
    leaves = [leaf for episode in episodes for leaf in episode.leaves]
    if not any(leaf.has_acted for leaf in leaves):
        raise RunStopped(
            f"all {len(leaves)} games of this step were over before the policy's first turn: the other "
            "seats (rollout.frozen, players in task.args) lose at once, and nothing can be learned"
        )
    if not any(span.author is Author.POLICY for row in trajectories for span in row.spans):
        longest = max(len(episode.spans[0]) for episode in episodes)
        raise RunStopped(
            f"no attempt sampled a single token: prompts of up to {longest} tokens fill the context; "
            "raise rollout.max_context"
        )
