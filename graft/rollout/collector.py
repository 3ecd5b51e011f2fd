"""Collectors turn tasks into episodes, all with the interface `Collector`.

SyncCollector           here                            on this thread: sampling and learning take turns
AsyncCollector          async_collector.py              on a thread, while this one learns
DistributedCollector    train/distributed/collector.py  over the processes of torchrun
RayCollector            cluster/collector.py            over the workers of a Ray cluster
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from graft.protocols import Stateful
from graft.rollout.branches.branch import Branch, independent
from graft.rollout.collect import collect
from graft.rollout.setup import RolloutSetup
from graft.types import Episode, Sampling, Task


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
    samples: int | None = 1
    """None: as many as the row of each task asks for."""
    sampling: Sampling | None = None
    """None: the setup's own."""
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
        if request.sampling is not None:
            setup = replace(setup, sampling=request.sampling)
        return setup, independent(request.samples) if request.held_out else self.branch

    def begin(self, request: RolloutRequest) -> None:
        """Give a branch that learns from step to step the number of this one."""
        if not request.held_out and isinstance(self.branch, Stateful):
            self.branch.begin(request.step)


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
        self.config.setup.close()


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


class _Collected:
    """Episodes that are complete."""

    def __init__(self, episodes: list[Episode]) -> None:
        self.episodes = episodes

    def result(self) -> list[Episode]:
        return self.episodes

    def is_done(self) -> bool:
        return True


class StalenessWindow:
    """The steps under way: the one that is learned next, and `staleness` more behind it.

    `make_request` gives the request of a step, `last` is the last step. Step j is submitted when step
    j - staleness is taken, that is, with the weights of version j - staleness - 1 or later: no token is
    older when j learns. With 0 a step is submitted when it is taken: sampling and learning take turns.

        staleness=1    take(1): submits 1, 2; waits for 1      take(2): submits 3; waits for 2
    """

    def __init__(
        self,
        collector: Collector,
        make_request: Callable[[int], RolloutRequest],
        staleness: int,
        last: int,
    ) -> None:
        self.collector, self.make_request = collector, make_request
        self.staleness, self.last = staleness, last
        self._pending: dict[int, PendingRollouts] = {}
        self._next: int | None = None

    def take(self, step: int) -> list[Episode]:
        """The episodes of a step; steps are taken in order."""
        first = step if self._next is None else self._next
        self._next = min(step + self.staleness, self.last) + 1
        for number in range(first, self._next):
            self._pending[number] = self.collector.submit(self.make_request(number))
        return self._pending.pop(step).result()

    def ahead(self) -> dict[int, list[Episode]]:
        """The episodes of the steps behind the last one taken: waits for them, and keeps them."""
        found = {number: pending.result() for number, pending in self._pending.items()}
        self._pending = {number: _Collected(episodes) for number, episodes in found.items()}
        return found

    def restore(self, ahead: Mapping[int, list[Episode]]) -> None:
        """Have these steps collected already: no step was taken yet."""
        self._pending = {number: _Collected(episodes) for number, episodes in ahead.items()}
        self._next = max(ahead) + 1 if ahead else None

    @property
    def is_done(self) -> bool:
        """Whether all steps under way are complete."""
        return self.num_done == len(self._pending)

    @property
    def num_done(self) -> int:
        """Steps that are complete and wait for the learner."""
        return sum(pending.is_done() for pending in self._pending.values())
