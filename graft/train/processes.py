"""What learning asks of the processes of a run: their numbers, sums over them, a name for each wait.

The processes that torchrun starts are a `distributed.process_group.ProcessGroup`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor


class Processes:
    """One process without others: every operation returns its own value."""

    def __init__(self) -> None:
        self.rank, self.world, self._tp = 0, 1, 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def dp_rank(self) -> int:
        """Which share of the batch is ours: rank 5 of 8 with tp=2 is (dp 2, tp 1)."""
        return self.rank // self._tp

    @property
    def dp_size(self) -> int:
        return self.world // self._tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self._tp

    def gather(self, value: Any, what: str) -> list[Any]:
        """The values of all ranks, by rank: data, as in `graft.trust.restricted_pickle`."""
        return [value]

    def add(self, tensors: Iterable[Tensor], what: str) -> None:
        """Sum over all ranks, in place; all ranks give tensors of the same shapes."""

    def max_over_ranks(self, number: float, what: str) -> float:
        """The largest number of all ranks."""
        return number

    def any(self, flag: bool, what: str) -> bool:
        """Whether the flag is set on any rank."""
        return self.max_over_ranks(float(flag), what) > 0

    def barrier(self, what: str) -> None:
        """Wait until all ranks have arrived here."""
        self.max_over_ranks(0.0, what)

    def together(self, what: str) -> AbstractContextManager[None]:
        """Name the collective operations of the block, for the message if one is late."""
        return nullcontext()


SINGLE = Processes()
"""The default of learner and optimizer."""
