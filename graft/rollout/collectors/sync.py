"""Collect on this thread, when the result is read: sampling and learning take turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graft.rollout.collect import collect
from graft.rollout.collectors.collector import PendingRollouts
from graft.rollout.collectors.request import CollectorConfig, RolloutRequest
from graft.types import Episode


class SyncCollector:
    """Collects inside `result()`."""

    def __init__(self, config: CollectorConfig) -> None:
        self.config = config

    def submit(self, request: RolloutRequest) -> PendingRollouts:
        return _DeferredRollouts(self.config, request)

    def load(self, weights: Mapping[str, Any] | None, version: int) -> None:
        self.config.setup.engine.load(weights, version)

    def counts(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.config.setup.engine.close()


class _DeferredRollouts:
    def __init__(self, config: CollectorConfig, request: RolloutRequest) -> None:
        self.config, self.request = config, request

    def result(self) -> list[Episode]:
        self.config.begin(self.request)
        setup, branch = self.config.setup_for(self.request)
        return collect(
            self.request.tasks,
            setup,
            branch,
            concurrency=self.config.concurrency,
            indices=self.request.indices,
        )

    def is_done(self) -> bool:
        return False
