"""A process of a cluster that samples: an engine, its environments, and nothing to learn with.

It is an asynchronous actor of Ray's: every method runs on one event loop, on which the engine's steps
are taken too. So new weights arrive between two steps, and a call that asks whether anybody is there is
answered while a thousand tools are waited for.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Any

from graft.types import Episode, Task


class RolloutWorker:
    """Made by `train.workers`, which also replaces it if it dies."""

    def __init__(self, number: int, folder: str) -> None:
        self.number = number
        with suppress(OSError):  # on a machine that has it: paths of a recipe may be relative
            os.chdir(folder)

    async def start(self, config: dict[str, Any]) -> tuple[str, str]:
        """Build engine and environments; ("", who this is), or what is wrong with the recipe."""
        from graft.config import Cluster, check
        from graft.rollout.crew import Ground, Grower
        from graft.train.setup import assemble

        recipe = check(config)
        # nobody learns here: the engine samples from the only copy there is
        calm = recipe.rollout.model_copy(update={"staleness": 0})
        alone = recipe.model_copy(update={"rollout": calm, "cluster": Cluster()})
        try:
            parts = assemble(alone)
        except ValueError as error:
            return f"{error}", ""
        ground = Ground(parts.setting, parts.held_out, parts.branch, recipe.rollout.concurrency)
        self.engine = parts.engine
        self.grower = Grower(ground, discards=recipe.rollout.unfinished == "discard")
        return "", f"pid {os.getpid()} on {socket.gethostname()}"

    async def ping(self) -> int:
        """Whether anybody is there; the version of its weights."""
        return self.engine.version if hasattr(self, "engine") else -1

    async def attempt(self, task: Task, job: Any, place: int) -> tuple[Episode, int]:
        """One episode, and how many attempts at it were discarded on the way."""
        before = self.grower.discarded
        episode = await self.grower.attempt(task, job, place)
        return episode, self.grower.discarded - before

    async def load(self, packed: dict[str, Any], version: int) -> int:
        """Weights from the object store; its version afterwards."""
        from graft.train.sending import unpacked

        self.grower.renew(unpacked(packed), version)
        return self.engine.version

    async def listen(self, meeting: Any, names: dict[str, Any], version: int) -> int:
        """Weights by broadcast, from the first learner to all workers at once."""
        import asyncio

        from graft.train.sending import receive

        # on a thread: pings must be answered while others are waited for
        weights = await asyncio.to_thread(receive, meeting, names)
        self.grower.renew(weights, version)
        return self.engine.version
