"""Supervised steps: the same learner, with cross-entropy of the assistant's tokens."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch

from graft.models.tree.forest import Forest
from graft.models.tree.packing import split_rows
from graft.rollout.batching import to_batch
from graft.train.learner import Learner
from graft.types import Episode


def sft_step(learner: Learner, episodes: Sequence[Episode]) -> dict[str, float]:
    """One optimizer step on these examples."""
    started = time.perf_counter()
    batch = to_batch([one for episode in episodes for one in episode.trajectories()])
    if learner.has_reference:
        batch = learner.annotate(batch)
    updated = learner.update(batch)
    tokens = sum(len(span) for episode in episodes for span in episode.spans)
    keep = ("loss", "entropy", "kl", "grad_norm", "learning_rate")
    seconds = time.perf_counter() - started
    return {
        **{name: updated[name] for name in keep if name in updated},
        **{name: value for name, value in updated.items() if name.startswith("experts/")},
        "num_tokens": float(tokens),
        "num_trained_tokens": float(batch.num_tokens),
        "tokens_per_second": tokens / seconds,
        "step_time": seconds,
    }


@torch.no_grad()
def held_out_scores(learner: Learner, batches: Iterable[Sequence[Episode]]) -> dict[str, float]:
    """Cross-entropy of held-out examples, and the share of their tokens that greedy decoding would give.

    Means over all trained tokens, as in training: a long answer counts more than a short one. Sums stay
    on the device until the last batch was started.
    """
    policy = learner.policy
    totals = torch.zeros(3, dtype=torch.float64, device=policy.device)
    for episodes in batches:
        batch = to_batch([one for episode in episodes for one in episode.trajectories()])
        for part in split_rows(batch.trajectories, learner.tokens_per_micro):
            micro = batch.rows(torch.tensor(part))
            forest = Forest(micro.trajectories, micro.mask, policy.device)
            allowed = forest.table(learner.allowed, policy.shape.head_rows)
            logp, is_best = policy.greedy_match(forest, allowed)
            totals[0] -= logp.sum(dtype=torch.float64)
            totals[1] += is_best.sum()
            totals[2] += len(logp)
    loss, hits, count = totals.tolist()
    return {
        "eval/loss": loss / max(count, 1.0),
        "eval/accuracy": hits / max(count, 1.0),
        "eval/num_tokens": count,
    }
