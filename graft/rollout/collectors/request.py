"""What a collector gets: a request with tasks, and the configuration that is the same for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from graft.protocols import Stateful
from graft.rollout.branches.branch import Branch, independent
from graft.rollout.setup import RolloutSetup
from graft.types import Task


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """Tasks to attempt together, and how."""

    tasks: Sequence[Task]
    name: str
    """For messages: "the episodes of step 12"."""
    step: int = 0
    salt: int = 0
    """Makes its draws differ from those of other requests."""
    held_out: bool = False
    """Attempt them in the held-out setup, `samples` times each and without branching."""
    samples: int = 1
    temperature: float | None = None
    """None: the run's own."""
    indices: Sequence[int] | None = None
    """The position of each task in the whole request, where this is a part of one."""

    def subset(self, numbers: Sequence[int]) -> RolloutRequest:
        """The request of some of its tasks."""
        indices = range(len(self.tasks)) if self.indices is None else self.indices
        return replace(
            self,
            tasks=[self.tasks[i] for i in numbers],
            indices=[indices[i] for i in numbers],
        )

    def numbered(self) -> Iterator[tuple[int, Task]]:
        """The tasks with their positions in the whole request."""
        indices = range(len(self.tasks)) if self.indices is None else self.indices
        return zip(indices, self.tasks, strict=True)


@dataclass(frozen=True, slots=True)
class CollectorConfig:
    """The setups of training and held-out rollouts, and where training attempts fork."""

    setup: RolloutSetup
    held_out: RolloutSetup
    branch: Branch
    concurrency: int = 256
    samples: int | None = None
    """Attempts that the branch must produce; None: any number."""

    def setup_for(self, request: RolloutRequest) -> tuple[RolloutSetup, Branch]:
        setup = replace(
            self.held_out if request.held_out else self.setup,
            salt=request.salt,
            samples=request.samples if request.held_out else self.samples,
        )
        if request.temperature is not None:
            sampling = replace(setup.sampling, temperature=request.temperature)
            setup = replace(setup, sampling=sampling)
        return setup, independent(request.samples) if request.held_out else self.branch

    def begin(self, request: RolloutRequest) -> None:
        """Give a branch that learns from step to step the number of this one."""
        if not request.held_out and isinstance(self.branch, Stateful):
            self.branch.begin(request.step)
