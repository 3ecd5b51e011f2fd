"""Sums over rows: rows added to rows of a total, in one order, and the total of a weight's gradients."""

from __future__ import annotations

from torch import Tensor

GRAD_SUM = "grad_sum"
"""Name of a weight's attribute: the fp32 tensor that its gradients are added to. `train.optimizer` attaches
it, the products of `models.kernels` add to it: no rounding to bf16, and no second copy of the gradient."""


def grad_sum_of(weight: Tensor) -> Tensor | None:
    return getattr(weight, GRAD_SUM, None)


def add_rows(total: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """total[index[i]] += rows[i], in place; rows with the same index are added from first to last.

    On a GPU `index_add_` adds them in any order; `index_put_` sorts them first. On a CPU it is the other way
    round.
    """
    if total.is_cuda:
        return total.index_put_((index,), rows, accumulate=True)
    return total.index_add_(0, index, rows)
