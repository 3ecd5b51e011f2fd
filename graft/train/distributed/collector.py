"""The processes of torchrun attempt a step's tasks together, each its share, and exchange episodes.

Of tasks 0 to 6 and three processes: 0 3 6 | 1 4 | 2 5. Then every process has all episodes, in the order
of the tasks, and computes the same batch and credit; the learning is divided again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from graft.protocols import Engine
from graft.rollout.collector import Collector, PendingRollouts, RolloutRequest
from graft.train.distributed.process_group import ProcessGroup
from graft.types import Episode


class DistributedCollector:
    """Divides a request over the collectors of all processes."""

    def __init__(self, collector: Collector, processes: ProcessGroup, engine: Engine) -> None:
        self.collector, self.processes, self.engine = collector, processes, engine

    def submit(self, request: RolloutRequest) -> PendingRollouts:
        rank, world = self.processes.rank, self.processes.world
        own = range(rank, len(request.tasks), world)
        return _Exchange(self.collector.submit(request.subset(own)), request, self.processes)

    def load(self, weights: Mapping[str, Any] | None, version: int) -> None:
        load_engines(weights, version, self.engine, self.processes, self.collector.load)

    def counts(self) -> dict[str, float]:
        everyone = self.processes.gather(self.collector.counts(), "counts of the rollouts")
        return {name: sum(own[name] for own in everyone) for name in everyone[0]}

    def close(self) -> None:
        self.collector.close()


def load_engines(
    weights: Mapping[str, Any] | None,
    version: int,
    engine: Engine,
    processes: ProcessGroup,
    load: Callable[[Mapping[str, Any] | None, int], None],
) -> None:
    """Each process loads its own engine; servers, which all processes share, are loaded once."""
    is_server = processes.world > 1 and not hasattr(engine, "decoder")
    if not is_server or processes.is_first:
        load(weights, version)
    elif weights is not None:
        for name in weights:  # gathering them needs every process
            weights[name]
    if is_server:
        processes.barrier(f"the servers to have version {version} of the weights")
        engine.version = version


class _Exchange:
    def __init__(
        self, own: PendingRollouts, request: RolloutRequest, processes: ProcessGroup
    ) -> None:
        self.own, self.request, self.processes = own, request, processes

    def result(self) -> list[Episode]:
        everyone = self.processes.gather(self.own.result(), self.request.name)
        shares = [iter(episodes) for episodes in everyone]
        return [next(shares[i % len(shares)]) for i in range(len(self.request.tasks))]

    def is_done(self) -> bool:
        return self.own.is_done()
