"""How far collecting may run ahead of learning."""

from __future__ import annotations

from collections.abc import Callable

from graft.rollout.collectors.collector import Collector, PendingRollouts
from graft.rollout.collectors.request import RolloutRequest
from graft.types import Episode


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

    @property
    def num_done(self) -> int:
        """Steps that are complete and wait for the learner."""
        return sum(pending.is_done() for pending in self._pending.values())
