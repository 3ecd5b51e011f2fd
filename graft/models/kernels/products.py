"""Matrix products that keep little for the backward pass and put their weight gradients in place.

    T tokens, D inputs, N outputs

What a norm or a gate hands to a product is made again in the backward pass, from what is kept
anyway: a pass over memory, against a fifth of all activations. The gradient of a weight that has a
`grad_sum` (fp32, see `train.optimizer`) is added to it inside the product that makes it: no rounding
to bf16 on the way, no second copy, no pass of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.models.kernels import gate, norm


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left right, where total is fp32 and the factors may be half as wide."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and torch.version.cuda is not None:  # inside the product, no temporary
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:  # neither CPU nor ROCm can mix the two
        total += left @ right


def sum_of(weight: Tensor) -> Tensor | None:
    """Where the gradients of this weight are added up, if anybody does."""
    return getattr(weight, "grad_sum", None)


def _grad_weight(ctx: Any, weight: Tensor, grad: Tensor, given: Tensor) -> Tensor | None:
    if ctx.grad_sum is None:
        return grad.T @ given
    add_product_(ctx.grad_sum, grad.T, given)
    return None


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        scale: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Any:
        total, normed, rstd = norm.normalise(x, delta, scale, eps)
        ctx.save_for_backward(total, scale, rstd, weight)
        ctx.set_materialize_grads(False)
        ctx.grad_sum = sum_of(weight)
        out = F.linear(normed, weight, bias)
        return out if delta is None else (total, out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        total, scale, rstd, weight = ctx.saved_tensors
        grad_total, grad = grads if len(grads) == 2 else (None, grads[0])
        if grad is None:  # nobody looked at the product
            return grad_total, grad_total, None, None, None, None
        has = ctx.needs_input_grad
        grad_weight = None
        if has[4]:
            normed = norm.normalise_again(total, scale, rstd)
            grad_weight = _grad_weight(ctx, weight, grad, normed)
        grad_bias = grad.sum(0) if has[5] else None
        grad_x, grad_scale = norm.differentiate(grad_total, grad @ weight, total, scale, rstd)
        grad_delta = grad_x if len(grads) == 2 else None
        return grad_x, grad_delta, grad_scale, None, grad_weight, grad_bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, has_gate: bool
    ) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.has_gate, ctx.grad_sum = has_gate, sum_of(weight)
        return F.linear(gate.gated(x) if has_gate else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        has = ctx.needs_input_grad
        grad_weight = None
        if has[1]:
            given = gate.gated(x) if ctx.has_gate else x
            grad_weight = _grad_weight(ctx, weight, grad, given)
        grad_bias = grad.sum(0) if has[2] else None
        grad_x = None
        if has[0]:
            grad_x = grad @ weight
            grad_x = gate.differentiate(x, grad_x) if ctx.has_gate else grad_x
        return grad_x, grad_weight, grad_bias, None


def norm_linear(
    x: Tensor, delta: Tensor | None, scale: Tensor, eps: float, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x + delta, and the product of its norm with the weight."""
    if delta is None:
        return x, _NormLinear.apply(x, None, scale, eps, weight, bias)
    return _NormLinear.apply(x, delta, scale, eps, weight, bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, has_gate: bool = False) -> Tensor:
    """x @ weight.T + bias; with a gate x is gate|up."""
    return _Linear.apply(x, weight, bias, has_gate)
