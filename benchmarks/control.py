"""A control for any run: `algo.credit=[benchmarks.control:zero]` trains on advantages of zero."""

from __future__ import annotations

from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.credits.credit import Credit


def zero() -> Credit:
    """All advantages are 0: what still changes was not learned from rewards."""

    def credit(advantages_NT: Tensor, batch: Batch) -> Tensor:
        return batch.zeros()

    return credit
