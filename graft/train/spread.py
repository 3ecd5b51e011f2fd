"""The processes of torchrun attempt a step's tasks together, each its share, and exchange episodes.

Of tasks 0 to 6 and three processes: 0 3 6 | 1 4 | 2 5. Everybody then has all episodes, in the order of
the tasks: batch and credit are worked out everywhere alike, and only the learning is shared out again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graft.protocols import Engine
from graft.rollout.crew import Crew, Job, Pending
from graft.train.processes import Processes
from graft.types import Episode


class Spread:
    """A crew of crews: one in each process."""

    def __init__(self, crew: Crew, processes: Processes, engine: Engine) -> None:
        self.crew, self.processes, self.engine = crew, processes, engine
        self.is_served = not hasattr(engine, "decoder")  # servers that all processes ask
        """Whether one process's weights are everybody's."""

    def submit(self, job: Job) -> Pending:
        rank, world = self.processes.rank, self.processes.world
        own = range(rank, len(job.tasks), world)
        return _Exchange(self.crew.submit(job.part(own)), job, self.processes)

    def load(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """Each process loads its own engine; servers are told once."""
        if not self.is_served or self.processes.is_first:
            self.crew.load(weights, version)
        elif weights is not None:
            for name in weights:  # they are brought together by everybody
                weights[name]
        if self.is_served:
            self.processes.barrier(f"the servers to have version {version} of the weights")
            self.engine.version = version

    def counts(self) -> dict[str, float]:
        everyone = self.processes.gather(self.crew.counts(), "counts of the rollouts")
        return {name: sum(own[name] for own in everyone) for name in everyone[0]}

    def close(self) -> None:
        self.crew.close()


class _Exchange:
    def __init__(self, own: Pending, job: Job, processes: Processes) -> None:
        self.own, self.job, self.processes = own, job, processes

    def result(self) -> list[Episode]:
        everyone = self.processes.gather(self.own.result(), self.job.name)
        shares = [iter(episodes) for episodes in everyone]
        return [next(shares[i % len(shares)]) for i in range(len(self.job.tasks))]

    def is_done(self) -> bool:
        return self.own.is_done()
