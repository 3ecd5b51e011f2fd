"""Where the tree forks: a branch is an async function that grows one episode to its leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from graft.rollout.episode_builder import EpisodeBuilder

Branch = Callable[[EpisodeBuilder], Awaitable[None]]


def independent(samples: int) -> Branch:
    """`samples` paths from the prompt that know nothing of each other: a plain GRPO group."""

    async def branch(builder: EpisodeBuilder) -> None:
        paths = [await builder.root() for _ in range(samples)]
        await asyncio.gather(*(path.finish() for path in paths))

    return branch


BRANCHES: dict[str, Callable[..., Branch] | str] = {
    "independent": independent,
    "arpo": "graft.rollout.branches.entropy:arpo",
    "aepo": "graft.rollout.branches.entropy:aepo",
    "counterfactual": "graft.rollout.branches.counterfactual:Counterfactual",
}
