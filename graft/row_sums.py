"""Rows added to rows of a total, in one order: the same bits each time."""

from __future__ import annotations

from torch import Tensor


def add_rows(total: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """total[index[i]] += rows[i], in place; rows with the same index are added from first to last.

    On a GPU `index_add_` adds them in any order; `index_put_` sorts them first. On a CPU it is the other way
    round.
    """
    if total.is_cuda:
        return total.index_put_((index,), rows, accumulate=True)
    return total.index_add_(0, index, rows)
