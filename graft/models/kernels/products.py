"""Matrix products that save little for the backward pass and add up weight gradients in fp32.

    T tokens, D inputs, N outputs

The output of a norm or a gate is computed again in the backward pass, by the kernel that
differentiates it: one more output, which saves a fifth of all activations. The gradient of a weight
that has a `grad_sum` is added to it inside the product that computes it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.models.kernels import gate, norm
from graft.models.kernels.fixed_product import fixed_linear
from graft.models.row_order import RowOrder
from graft.row_sums import add_rows, grad_sum_of


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left right, where total is fp32 and the factors may be half as wide."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and torch.version.cuda is not None:  # inside the product, no temporary
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:  # neither CPU nor ROCm can mix the two
        total += left @ right


def _grad_weight(ctx: Any, grad: Tensor, product_input: Tensor) -> Tensor | None:
    if ctx.grad_sum is None:
        return grad.T @ product_input
    add_product_(ctx.grad_sum, grad.T, product_input)
    return None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, order: RowOrder | None) -> Tensor:
    return F.linear(x, weight, bias) if order is None else order.product(x, weight, bias)


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
        order: RowOrder | None,
        offset: bool,
    ) -> Any:
        keeps_unit = any(ctx.needs_input_grad)
        total, normed, unit, rstd = norm.normalise(x, delta, scale, eps, keeps_unit, offset)
        ctx.save_for_backward(unit, scale, rstd, weight)
        ctx.dtype, ctx.offset = x.dtype, offset
        ctx.set_materialize_grads(False)
        ctx.grad_sum = grad_sum_of(weight)
        out = _product(normed, weight, bias, order)
        return out if delta is None else (total, out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        unit, scale, rstd, weight = ctx.saved_tensors
        grad_total, grad = grads if len(grads) == 2 else (None, grads[0])
        if grad is None:  # the product was not used
            grad_delta = None if grad_total is None else grad_total.to(scale.dtype)
            return grad_total, grad_delta, *[None] * 6
        has = ctx.needs_input_grad
        normed = torch.empty_like(unit) if has[4] else None
        grad_x, grad_delta, grad_scale = norm.differentiate(
            grad_total, grad @ weight, unit, scale, rstd, ctx.dtype, normed, ctx.offset
        )
        grad_weight = None if normed is None else _grad_weight(ctx, grad, normed)
        grad_bias = grad.sum(0) if has[5] else None
        grad_delta = grad_delta if len(grads) == 2 else None
        return grad_x, grad_delta, grad_scale, None, grad_weight, grad_bias, None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
        order: RowOrder | None,
    ) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.activation, ctx.grad_sum = activation, grad_sum_of(weight)
        return _product(gate.gated(x, activation) if activation else x, weight, bias, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        has = ctx.needs_input_grad
        product_input, grad_x = x, None
        if has[0] or ctx.activation:
            grad_x = grad @ weight
        if ctx.activation:
            product_input = torch.empty_like(grad_x)
            grad_x = gate.differentiate(x, grad_x, product_input, ctx.activation)
        grad_weight = _grad_weight(ctx, grad, product_input) if has[1] else None
        grad_bias = grad.sum(0) if has[2] else None
        return grad_x, grad_weight, grad_bias, None, None


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        ctx.grad_sum = grad_sum_of(weight)
        # always our own product: it has one order, and is fast enough for few outputs
        out = torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)
        return fixed_linear(x, weight, out=out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        grad, has = grads[0], ctx.needs_input_grad
        grad_x = (grad @ weight.float()).to(x.dtype) if has[0] else None
        grad_weight = None
        if has[1]:
            known = grad.T @ x.float()
            grad_weight = known.to(weight.dtype) if ctx.grad_sum is None else None
            if ctx.grad_sum is not None:
                ctx.grad_sum += known
        return grad_x, grad_weight


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in fp32, [T, E]."""
    return _RouterLogits.apply(x, weight)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(tokens)
        ctx.grad_sum = grad_sum_of(weight)
        return F.embedding(tokens, weight).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (tokens,) = ctx.saved_tensors
        add_rows(ctx.grad_sum, tokens, grads[0].to(ctx.grad_sum.dtype))
        return None, None


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """weight[tokens] in fp32, the start of the residual stream.

    With a gradient sum the backward pass touches only the rows of these tokens.
    """
    if grad_sum_of(weight) is None:
        return F.embedding(tokens, weight).float()
    return _Embed.apply(tokens, weight)


def norm_linear(
    x: Tensor,
    delta: Tensor | None,
    scale: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    order: RowOrder | None = None,
    offset: bool = False,
) -> tuple[Tensor, Tensor]:
    """x + delta, and the product of its norm with the weight."""
    if delta is None:
        return x, _NormLinear.apply(x, None, scale, eps, weight, bias, order, offset)
    return _NormLinear.apply(x, delta, scale, eps, weight, bias, order, offset)


def norm_gated(
    x: Tensor,
    delta: Tensor | None,
    scale: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    offset: bool = False,
) -> tuple[Tensor, Tensor]:
    """x + delta, and the gated product of gate|up, the product of its norm with the weight. No gradient."""
    total, normed, *_ = norm.normalise(x, delta, scale, eps, keeps_unit=False, offset=offset)
    return total, fixed_linear(normed, weight, bias, gate=activation)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str = "",
    order: RowOrder | None = None,
) -> Tensor:
    """x @ weight.T + bias; with an activation (silu, gelu_tanh) x is gate|up."""
    return _Linear.apply(x, weight, bias, activation, order)
