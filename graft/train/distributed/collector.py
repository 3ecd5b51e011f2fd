"""The processes of torchrun attempt a step's tasks together, each its share, and exchange episodes.

Of tasks 0 to 6 and three processes: 0 3 6 | 1 4 | 2 5. Then every process has all episodes, in the order
of the tasks, and computes the same batch and credit; the learning is divided again.

Processes that hold one engine together (engine.tp) have one share: the first of them attempts its tasks,
and the others compute their part of every step of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from graft.engine.engine_group import group_of, lead
from graft.engine.remote.servers_engine import ServersEngine
from graft.protocols import Engine
from graft.rollout.collector import Collector, PendingRollouts, RolloutRequest
from graft.train.distributed.process_group import ProcessGroup
from graft.types import Episode


class DistributedCollector:
    """Divides a request over the collectors of all processes."""

    def __init__(self, collector: Collector, processes: ProcessGroup, engine: Engine) -> None:
        self.collector, self.processes, self.engine = collector, processes, engine

    def submit(self, request: RolloutRequest) -> PendingRollouts:
        group = group_of(self.engine)
        size = 1 if group is None else group.size
        first, shares = self.processes.rank // size, self.processes.world // size
        own = request.subset(range(first, len(request.tasks), shares))
        return _Exchange(self.collector.submit(own), request, self.processes, self.engine)

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
    is_server = processes.world > 1 and isinstance(engine, ServersEngine)
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
        self,
        own: PendingRollouts,
        request: RolloutRequest,
        processes: ProcessGroup,
        engine: Engine,
    ) -> None:
        self.own, self.request, self.processes, self.engine = own, request, processes, engine

    def result(self) -> list[Episode]:
        found = lead(self.engine, self.own.result)  # None where this process only follows
        everyone = self.processes.gather(found, self.request.name)
        shares = [iter(episodes) for episodes in everyone if episodes is not None]
        return [next(shares[i % len(shares)]) for i in range(len(self.request.tasks))]

    def is_done(self) -> bool:
        return self.own.is_done()
