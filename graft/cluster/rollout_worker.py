"""A process of a cluster that samples: an engine, its environments, and nothing to learn with.

It is an asynchronous actor of Ray's: every method runs on one event loop, on which the engine's steps
are taken too. So new weights arrive between two steps, and a call that asks whether anybody is there is
answered while a thousand tools are waited for.

What goes wrong is given back in words, not raised: the words come from where the error is known best.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.types import Episode, Task


@dataclass(frozen=True, slots=True)
class Attempted:
    """How an attempt ended."""

    episode: Episode | None
    discarded: int = 0
    """Attempts at it that were thrown away on the way."""
    wrong: str = ""
    """Why there is no episode: an error that would come anywhere else too."""


class RolloutWorker:
    """Made by `cluster.collector`, which also replaces it if it dies."""

    def __init__(self, number: int, folder: str) -> None:
        self.number = number
        with suppress(OSError):  # on a machine that has it: paths of a recipe may be relative
            os.chdir(folder)

    async def who(self) -> str:
        return f"pid {os.getpid()} on {socket.gethostname()}"

    async def start(self, config: dict[str, Any]) -> str:
        """Build engine and environments; what is wrong with the recipe, or nothing."""
        from graft.rollout.collectors.attempt_runner import AttemptRunner
        from graft.train.build import build_run
        from graft.train.distributed.failures import describe

        try:
            recipe = self._recipe(config)
            components = build_run(recipe)
        except Exception as error:
            return describe(error)
        self.engine = components.engine
        self.runner = AttemptRunner(
            components.collector_config, discards=recipe.rollout.unfinished == "discard"
        )
        return ""

    def _recipe(self, config: dict[str, Any]) -> Any:
        """The run's, without what concerns learners: the engine samples from the only copy there is."""
        from graft.config import ClusterSection, ParallelSection, check

        recipe = check(config)
        run = Path(recipe.run.dir) / recipe.run.name
        exchange = Path(recipe.engine.exchange or run / "exchange") / f"worker-{self.number}"
        return recipe.model_copy(
            update={
                "rollout": recipe.rollout.model_copy(update={"staleness": 0}),
                "engine": recipe.engine.model_copy(update={"exchange": str(exchange)}),
                "parallel": ParallelSection(),
                "cluster": ClusterSection(),
            }
        )

    async def ping(self) -> None:
        """Whether anybody is there."""

    async def attempt(self, task: Task, request: Any, index: int) -> Attempted:
        """One episode."""
        from graft.train.distributed.failures import describe

        try:
            episode = await self.runner.attempt(task, request, index)
        except Exception as error:
            return Attempted(None, wrong=describe(error))
        # whoever ends next tells of all that were discarded since: each once
        discarded, self.runner.num_discarded = self.runner.num_discarded, 0
        return Attempted(episode, discarded)

    async def load(self, packed: dict[str, Any], version: int) -> str:
        """Weights from the object store; what is wrong with them, or nothing."""
        from graft.cluster.weight_transfer import UnpackedWeights

        return self._renew(UnpackedWeights(packed), version)

    async def listen(self, meeting: Any, names: dict[str, Any], version: int) -> str:
        """Weights by broadcast, from the first learner to all workers at once."""
        import asyncio

        from graft.cluster.weight_transfer import receive

        try:  # on a thread: pings must be answered while others are waited for
            weights = await asyncio.to_thread(receive, meeting, names)
        except RuntimeError as error:
            return f"{error}"
        return self._renew(weights, version)

    def _renew(self, weights: Mapping[str, Any], version: int) -> str:
        from graft.train.distributed.failures import describe

        try:
            self.runner.load(weights, version)
        except Exception as error:
            return describe(error)
        return ""
