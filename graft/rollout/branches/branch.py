"""A branch decides where the tree forks: an async function that builds one episode to its leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from graft.rollout.episode_builder import EpisodeBuilder

Branch = Callable[[EpisodeBuilder], Awaitable[None]]


def independent(samples: int) -> Branch:
    """`samples` independent trajectories from the prompt: a plain GRPO group."""

    async def branch(builder: EpisodeBuilder) -> None:
        trajectories = [await builder.root() for _ in range(samples)]
        await asyncio.gather(*(one.finish() for one in trajectories))

    return branch


BRANCHES: dict[str, Callable[..., Branch] | str] = {
    "independent": independent,
    "arpo": "graft.rollout.branches.entropy:arpo",
    "aepo": "graft.rollout.branches.entropy:aepo",
    "counterfactual": "graft.rollout.branches.counterfactual:Counterfactual",
}
