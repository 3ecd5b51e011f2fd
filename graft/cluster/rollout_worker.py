"""A Ray worker that samples: an engine and its environments, without a learner.

It is an asynchronous Ray actor: every method runs on one event loop, together with the engine's steps. So
new weights arrive between two steps, and pings are answered while tools run.

Errors are returned as text and not raised: the text is written where the cause is known.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.cluster.weight_transfer import BroadcastGroup, UnpackedWeights
from graft.config import ClusterSection, Config, ParallelSection, unpacked
from graft.rollout.async_collector import AttemptRunner
from graft.rollout.collector import RolloutRequest
from graft.train.distributed.failures import describe
from graft.types import Episode, Task


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How an attempt ended."""

    episode: Episode | None
    num_discarded: int = 0
    """Discarded attempts of this worker since its last result."""
    error: str = ""
    """Why there is no episode: an error that would occur on any worker."""


class RolloutWorker:
    """Created by `cluster.collector`, which replaces it if it dies."""

    def __init__(self, number: int, folder: str) -> None:
        self.number = number
        with suppress(OSError):  # so that relative paths of a recipe work
            os.chdir(folder)

    async def process(self) -> str:
        return f"pid {os.getpid()} on {socket.gethostname()}"

    async def start(self, config: dict[str, Any]) -> str:
        """Build engine and environments; returns the fault of the recipe, if any."""
        from graft.train.build import build_run

        try:
            recipe = self._recipe(config)
            components = build_run(recipe)
        except Exception as error:
            return describe(error)
        self.runner = AttemptRunner(
            components.collector_config, discards=recipe.rollout.unfinished == "discard"
        )
        return ""

    def _recipe(self, config: dict[str, Any]) -> Config:
        """The run's config without its learner settings: the engine holds the only copy of the weights."""
        recipe = unpacked(config)
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
        """Answer a ping."""

    async def attempt(self, task: Task, request: RolloutRequest, index: int) -> AttemptResult:
        try:
            episode = await self.runner.attempt(task, request, index)
        except Exception as error:
            return AttemptResult(None, error=describe(error))
        num_discarded, self.runner.num_discarded = self.runner.num_discarded, 0
        return AttemptResult(episode, num_discarded)

    async def load(self, packed: dict[str, Any], version: int) -> str:
        """Load weights from the object store; returns the fault, if any."""
        return self._load(UnpackedWeights(packed), version)

    async def receive(self, group: BroadcastGroup, shapes: dict[str, Any], version: int) -> str:
        """Receive weights by broadcast from the first learner; returns the fault, if any."""
        try:  # on a thread, so that pings are answered meanwhile
            weights = await asyncio.to_thread(group.receive, shapes)
        except RuntimeError as error:
            return f"{error}"
        return self._load(weights, version)

    def _load(self, weights: Mapping[str, Any], version: int) -> str:
        try:
            self.runner.load(weights, version)
        except Exception as error:
            return describe(error)
        return ""
