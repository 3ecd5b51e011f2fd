"""The collector of several learners: the first one has the workers and forwards their episodes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from graft.rollout.collector import Collector, PendingRollouts, RolloutRequest
from graft.train.distributed.process_group import ProcessGroup
from graft.types import Episode


class SharedCollector:
    """`workers` is the first learner's collector, and None on the others."""

    def __init__(self, workers: Collector | None, processes: ProcessGroup) -> None:
        self.workers, self.processes = workers, processes

    def submit(self, request: RolloutRequest) -> PendingRollouts:
        own = None if self.workers is None else self.workers.submit(request)
        return _ForwardedRollouts(own, request.name, self.processes)

    def load(self, weights: Mapping[str, Any] | None, version: int) -> None:
        if self.workers is not None:
            self.workers.load(weights, version)
        elif weights is not None:
            for name in weights:  # all processes gather them together
                weights[name]
        self.processes.barrier(f"the workers to have version {version} of the weights")

    def counts(self) -> dict[str, float]:
        own = {} if self.workers is None else self.workers.counts()
        return self.processes.share(own, "counts of the rollouts")

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()


class _ForwardedRollouts:
    def __init__(self, own: PendingRollouts | None, name: str, processes: ProcessGroup) -> None:
        self.own, self.name, self.processes = own, name, processes

    def result(self) -> list[Episode]:
        # episodes may take longer than the deadline between processes: send regular signs of life
        while self.processes.any(self._takes_longer(), f"{self.name}, or that they take longer"):
            pass
        return self.processes.share(None if self.own is None else self.own.result(), self.name)

    def _takes_longer(self) -> bool:
        if self.own is None:
            return False
        end = time.monotonic() + self.processes.deadline / 4
        while not self.own.is_done() and time.monotonic() < end:
            time.sleep(0.01)
        return not self.own.is_done()

    def is_done(self) -> bool:
        return self.own is not None and self.own.is_done()
