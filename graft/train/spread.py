"""The processes of torchrun attempt a step's tasks together, each its share, and exchange episodes.

Of tasks 0 to 6 and three processes: 0 3 6 | 1 4 | 2 5. Everybody then has all episodes, in the order of
the tasks: batch and credit are worked out everywhere alike, and only the learning is shared out again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from graft.protocols import Engine
from graft.rollout.crew import Crew, Job, Pending
from graft.train.processes import Processes
from graft.types import Episode


class Spread:
    """A crew of crews: one in each process."""

    def __init__(self, crew: Crew, processes: Processes, engine: Engine) -> None:
        self.crew, self.processes, self.engine = crew, processes, engine

    def submit(self, job: Job) -> Pending:
        rank, world = self.processes.rank, self.processes.world
        own = range(rank, len(job.tasks), world)
        return _Exchange(self.crew.submit(job.part(own)), job, self.processes)

    def load(self, weights: Mapping[str, Any] | None, version: int) -> None:
        hand_out(weights, version, self.engine, self.processes, self.crew.load)

    def counts(self) -> dict[str, float]:
        everyone = self.processes.gather(self.crew.counts(), "counts of the rollouts")
        return {name: sum(own[name] for own in everyone) for name in everyone[0]}

    def close(self) -> None:
        self.crew.close()


def hand_out(
    weights: Mapping[str, Any] | None,
    version: int,
    engine: Engine,
    processes: Processes,
    load: Callable[[Mapping[str, Any] | None, int], None],
) -> None:
    """Each process loads its own engine; servers, which all of them ask, are told once."""
    is_served = processes.world > 1 and not hasattr(engine, "decoder")
    if not is_served or processes.is_first:
        load(weights, version)
    elif weights is not None:
        for name in weights:  # they are brought together by everybody
            weights[name]
    if is_served:
        processes.barrier(f"the servers to have version {version} of the weights")
        engine.version = version


class _Exchange:
    def __init__(self, own: Pending, job: Job, processes: Processes) -> None:
        self.own, self.job, self.processes = own, job, processes

    def result(self) -> list[Episode]:
        everyone = self.processes.gather(self.own.result(), self.job.name)
        shares = [iter(episodes) for episodes in everyone]
        return [next(shares[i % len(shares)]) for i in range(len(self.job.tasks))]

    def is_done(self) -> bool:
        return self.own.is_done()
