"""Attempts at tasks on a running event loop, and new weights between two of its steps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from graft.rollout.collect import build_episode
from graft.rollout.collectors.request import CollectorConfig, RolloutRequest
from graft.types import Episode, Task


class AttemptRunner:
    """Attempts tasks in the order of the calls, at most `concurrency` at a time.

    Weights are loaded on the same loop, between two steps of the engine, so no token is computed with
    half of them. The engine needs its own copy, because the learner continues to change the original.
    """

    def __init__(self, config: CollectorConfig, *, discards: bool = False) -> None:
        """`discards`: new weights discard the training attempts under way, which start again."""
        self.config, self.discards = config, discards
        self.num_discarded = 0
        self._gate = asyncio.Semaphore(config.concurrency)
        self._running: set[asyncio.Task[Episode]] = set()
        self._discarded: set[asyncio.Task[Episode]] = set()

    async def attempt(self, task: Task, request: RolloutRequest, index: int) -> Episode:
        """One episode; one that is discarded on the way starts again."""
        async with self._gate:
            while True:
                setup, branch = self.config.setup_for(request)
                running = asyncio.create_task(build_episode(task, setup, branch, index))
                if not request.held_out:
                    self._running.add(running)
                try:
                    return await running
                except asyncio.CancelledError:
                    own = asyncio.current_task()
                    if running not in self._discarded or (own is not None and own.cancelling()):
                        raise  # this call itself is cancelled
                    self.num_discarded += 1
                finally:
                    self._running.discard(running)
                    self._discarded.discard(running)

    def load(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """New weights, now: samples under way pause and continue with them, or are discarded."""
        engine = self.config.setup.engine
        if self.discards:
            discarded = {one for one in self._running if not one.done()} - self._discarded
            self._discarded |= discarded
            for one in discarded:
                one.cancel()
        engine.pause()
        engine.load(weights, version)
