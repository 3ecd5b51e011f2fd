"""The interface of all collectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from graft.rollout.collectors.request import RolloutRequest
from graft.types import Episode


class PendingRollouts(Protocol):
    """Episodes that are being collected."""

    def result(self) -> list[Episode]:
        """Wait for them; they are in the order of the tasks."""
        ...

    def is_done(self) -> bool: ...


class Collector(Protocol):
    """Turns tasks into episodes.

    pending = collector.submit(RolloutRequest(tasks, "the episodes of step 12", salt=12))
    episodes = pending.result()
    collector.load(weights, version=12)      # samples from now on are of these weights
    """

    def submit(self, request: RolloutRequest) -> PendingRollouts:
        """May begin at once."""
        ...

    def load(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """New weights for the engines; None: they hold the learner's own tensors."""
        ...

    def counts(self) -> dict[str, float]:
        """Metrics since the last call."""
        ...

    def close(self) -> None: ...
