"""The fp32 tensor that a weight's gradients are added to, if the optimizer attached one.

`train.optimizer` attaches it, the products of `kernels.products` add to it: no rounding to bf16, and no
second copy of the gradient.
"""

from __future__ import annotations

from torch import Tensor

GRAD_SUM = "grad_sum"
"""Name of the weight's attribute."""


def grad_sum_of(weight: Tensor) -> Tensor | None:
    return getattr(weight, GRAD_SUM, None)
