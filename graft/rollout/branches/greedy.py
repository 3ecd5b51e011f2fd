"""A greedy attempt beside the sampled ones: its reward is their baseline (ReMax)."""

from __future__ import annotations

from dataclasses import replace

from graft.rollout.branches.branch import Branch
from graft.rollout.episode_builder import EpisodeBuilder
from graft.rollout.failure import concurrently
from graft.types import Status


def greedy_baseline(samples: int) -> Branch:
    """`samples` attempts as from `independent`, with the same draws, and one that always takes the
    likeliest token.

    The greedy one is not trained and is in no group; `Batch.greedy_reward` has its reward.
    """

    async def branch(builder: EpisodeBuilder) -> None:
        attempts = [await builder.root() for _ in range(samples)]
        greedy = await builder.root()
        base = builder.setup.sampling
        greedy.sampling = replace(base, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
        await concurrently(lambda one: one.finish(), [*attempts, greedy])
        leaf = greedy.leaf
        if leaf is not None and leaf.status.is_trainable:  # one that failed is no baseline
            leaf.status = Status.BASELINE

    return branch
