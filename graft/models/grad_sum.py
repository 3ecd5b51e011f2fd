"""The fp32 sum that a weight's gradients are added to, where the optimizer gives it one.

`train.optimizer` attaches it, the products of `kernels.products` add to it: no rounding to bf16 on the
way, and no second copy of the gradient.
"""

from __future__ import annotations

from torch import Tensor

GRAD_SUM = "grad_sum"
"""The attribute of a weight."""


def grad_sum_of(weight: Tensor) -> Tensor | None:
    return getattr(weight, GRAD_SUM, None)
