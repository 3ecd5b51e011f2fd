"""Norm, rotation and gate as single differentiable functions.

    T tokens, D width, H query heads, K key/value heads, d head size, F width of the MLP

Composed of autograd's operations each of them is a dozen passes over memory, most of them in the backward
pass; written by hand it is three or four, and in a Triton kernel one. The definitions are here, in plain
PyTorch; a device with kernels computes the same in `graft.models.kernels`. Sums are in fp32 for any
dtype of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._nn import silu  # F.silu cannot write into a tensor

from graft.models.angles import HeadRotation
from graft.models.device import has_kernels
from graft.models.kv_slots import KVSlots, round_rows
from graft.models.row_order import RowOrder
from graft.row_sums import add_rows


class _RmsNorm(torch.autograd.Function):
    """y = x / rms(x) * weight over the last axis; `weight` is [D], or [H, D] for x of [T, H, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        y = wide * scale
        return y.mul_(weight) if y.dtype == weight.dtype else y.to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        # y = x scale w;  dx = scale (g w) - x scale^3 / D sum(g w x);  dw = sum over rows of g x scale
        x, weight, scale = ctx.saved_tensors
        grad, wide = grads[0].float(), x.float()
        product = grad * wide
        if weight.ndim == 1:  # two matrix-vector products instead of two more passes
            along = (product @ weight.float()).unsqueeze(-1)
            grad_weight = scale.flatten() @ product.flatten(0, -2)
        else:
            along = (product * weight).sum(-1, keepdim=True)
            grad_weight = product.mul_(scale).flatten(0, -1 - weight.ndim).sum(0)
        along *= scale.pow(3).div_(-x.shape[-1])
        grad_x = (grad * weight).mul_(scale).addcmul_(wide, along)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, offset: bool = False
) -> tuple[Tensor, Tensor]:
    """x + delta, and rms_norm of that sum; without a delta the sum is x. [T, D] each

    With an `offset` the weight is stored as its distance from 1.
    """
    if has_kernels(x.device):
        from graft.models.kernels import norm

        return norm.add_norm(x, delta, weight, eps, offset)
    total = x if delta is None else x + delta
    return total, _RmsNorm.apply(total, 1 + weight if offset else weight, eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    size = 2 * cos.shape[-1]  # less than d where only a part of the head is rotated
    out[..., size:] = x[..., size:]
    left, right = x[..., :size].chunk(2, dim=-1)
    out_left, out_right = out[..., :size].chunk(2, dim=-1)
    torch.mul(left, cos, out=out_left)
    out_left.addcmul_(right, sin, value=-sign)
    torch.mul(right, cos, out=out_right)
    out_right.addcmul_(left, sin, value=sign)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        # the transpose of a rotation is its inverse
        return _rotate(grads[0], cos, sin, -1.0), None, None


def qk_rotate(qkv: Tensor, how: HeadRotation) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, H, d], k [T, K, d] and v [T, K, d] from the concatenated q|k|v, [T, (H+2K) d]."""
    if has_kernels(qkv.device):
        from graft.models.kernels import rope

        return rope.qk_rotate(qkv, how)
    heads, kv_heads = how.heads, how.kv_heads
    all_heads = heads + 2 * kv_heads
    qkv = qkv.view(len(qkv), all_heads, qkv.shape[1] // all_heads)
    qk, v = qkv.split([heads + kv_heads, kv_heads], dim=1)
    if how.q_weight is not None and how.k_weight is not None:  # both in one call
        qk = _RmsNorm.apply(qk, how.head_weights(), how.eps)
    elif how.query_scale != 1:
        qk = torch.cat([qk[:, :heads] * how.query_scale, qk[:, heads:]], 1)
    q, k = _Rotate.apply(qk, how.cos[:, None], how.sin[:, None]).split([heads, kv_heads], dim=1)
    return (q, round_rows(k), round_rows(v)) if how.rounds_kv else (q, k, v)


def attend_qkv(
    attend: Any, layer: int, qkv: Tensor, how: HeadRotation, sinks: Tensor | None = None
) -> Tensor:
    """Attention [T, H, d] of q|k|v; an `attend` with kernels may keep less than q, k and v."""
    of_qkv, more = getattr(attend, "of_qkv", None), () if sinks is None else (sinks,)
    if of_qkv is None:
        return attend(layer, *qk_rotate(qkv, how), *more)
    return of_qkv(layer, qkv, how, *more)


def qk_rotate_to_slots(qkv: Tensor, how: HeadRotation, kv_slots: KVSlots, layer: int) -> Tensor:
    """The same without gradients: q is returned, keys and values are written to their slots."""
    if has_kernels(qkv.device):
        from graft.models.kernels import rope

        return rope.qk_rotate_to_slots(qkv, how, kv_slots, layer)
    q, k, v = qk_rotate(qkv, how)
    kv_slots.write(layer, k, v)
    return q


VECTORS, GRAIN = 32, 1 << 15
"""Numbers to which a CPU applies a function in a turn of its loop, and the least that are worth a thread."""

SERIAL = GRAIN // 2
"""Numbers that one thread computes alone, whichever the function."""


def _shares(count: int) -> int:
    """A multiple of the parts in which threads compute so many numbers: of some functions as many as there
    are threads, of others as many as are worth it."""
    threads = torch.get_num_threads()
    return math.lcm(threads, max(1, min(threads, math.ceil(count / GRAIN))))


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of each number of x, so that its bits depend on that number alone.

    A CPU computes what is left over of a row of vectors by other instructions, and the sigmoid of a number
    then differs with its place. Here nothing is left over, of any thread.
    """
    if x.device.type != "cpu":
        return function(x)
    flat = x.contiguous().view(-1)
    count = len(flat)
    while missing := -count % (VECTORS * _shares(count)):
        count += missing
    padded = F.pad(flat, (0, count - len(flat))) if count > len(flat) else flat
    return function(padded)[: len(flat)].view(x.shape)


def _by_rows(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    """`function` of x [T, F], the half of wider rows, so that the bits of a row depend on that row alone.

    A CPU takes such rows one by one, a column always by the same instructions, but threads meet in the middle
    of a row unless each has as many. The rows that are over come after the others.
    """
    even, width = x.shape
    if x.device.type == "cpu" and x.numel() > SERIAL:
        while over := even % _shares(even * width):
            even -= over
    if even == len(x):
        return function(x)
    out, some = x.new_empty(x.shape), max(1, SERIAL // width)
    for part in (slice(even), *(slice(at, at + some) for at in range(even, len(x), some))):
        function(x[part], out=out[part])
    return out


ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "silu": (silu, torch.ops.aten.silu_backward.grad_input),
    "gelu_tanh": (
        partial(F.gelu, approximate="tanh"),
        partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh"),
    ),
}
"""The function of a gate, and the gradient of what it is computed of."""


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: str) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        gate, up = gate_up.chunk(2, dim=-1)
        return _by_rows(ACTIVATIONS[activation][0], gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        function, differentiate = ACTIVATIONS[ctx.activation]
        torch.mul(grads[0], function(gate), out=grad_up)
        differentiate(grads[0] * up, gate, grad_input=grad_gate)
        return grad, None


def gate_product(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """silu(gate) * up, or with gelu_tanh, of the concatenated gate|up: [T, 2F] -> [T, F]"""
    return _Gate.apply(gate_up, activation)


def clamped_gate(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate), each clamped, of alternating columns: [T, 2F] -> [T, F]"""
    up = gate_up[..., 1::2].clamp(-limit, limit)
    below = gate_up.clamp(max=limit)
    share = elementwise(torch.sigmoid, (below * alpha)[..., ::2])
    return (up + 1) * (below[..., ::2] * share)


FEW_ROWS = 4
"""Most rows for which a matrix product is bound by reading its weights; see `kernels.skinny`."""


def has_few_rows(x: Tensor) -> bool:
    """Whether our kernel is faster than the library's product: few rows, no gradients."""
    return len(x) <= FEW_ROWS and not torch.is_grad_enabled() and has_kernels(x.device)


def can_gate_inside(x: Tensor, order: RowOrder | None) -> bool:
    """Whether `norm_linear` may compute the gate of gate|up too: in our own product, without gradients."""
    if order is None or torch.is_grad_enabled() or not has_kernels(x.device):
        return False
    return len(x) <= order.gate_rows


def norm_linear(
    x: Tensor,
    delta: Tensor | None,
    scale: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    order: RowOrder | None = None,
    gate: str = "",
    offset: bool = False,
) -> tuple[Tensor, Tensor]:
    """x + delta, and the product of its norm with weight [N, D], in the `order` if there is one; with a
    `gate` (silu, gelu_tanh), where `can_gate_inside`, the gated product of it; `offset` as of `add_norm`."""
    if order is None and has_few_rows(x):
        from graft.models.kernels.skinny import skinny_linear

        return skinny_linear(x, weight, bias, norm=(delta, scale, eps, offset))
    if has_kernels(x.device):
        from graft.models.kernels import products

        if gate:
            return products.norm_gated(x, delta, scale, eps, weight, bias, gate, offset)
        return products.norm_linear(x, delta, scale, eps, weight, bias, order, offset)
    total, normed = add_norm(x, delta, scale, eps, offset)
    return total, _product(normed, weight, bias, order)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: str = "",
    order: RowOrder | None = None,
) -> Tensor:
    """x @ weight.T + bias; with a gate (silu, gelu_tanh) x is gate|up, whose gated product is taken."""
    if order is None and has_few_rows(x):
        from graft.models.kernels.skinny import skinny_linear

        return skinny_linear(x, weight, bias, gate=gate)[1]
    if has_kernels(x.device):
        from graft.models.kernels import products

        return products.linear(x, weight, bias, gate, order)
    return _product(gate_product(x, gate) if gate else x, weight, bias, order)


def router_logits(x: Tensor, weight: Tensor, order: RowOrder | None = None) -> Tensor:
    """x @ weight.T in fp32 for any dtype of both, [T, E]."""
    if has_kernels(x.device):
        from graft.models.kernels import products

        return products.router_logits(x, weight)
    wide = weight.float()
    return F.linear(x.float(), wide) if order is None else order.product(x.float(), wide)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, order: RowOrder | None) -> Tensor:
    if order is not None and order.block is not None:
        return order.product(x, weight, bias)
    return F.linear(x, weight, bias)


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """weight[tokens], [T, D]: the start of the residual stream, which kernels keep in fp32.

    In bf16 each of its sums, two per layer, would round off part of what was added before.
    """
    if has_kernels(weight.device):
        from graft.models.kernels import products

        return products.embed(tokens, weight)
    return F.embedding(tokens, weight)


def add_linear(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: str = "",
    order: RowOrder | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The stream and its pending addition (or None); their sum is x + linear(y).

    A CPU adds inside the matrix product if there is no bias and it is one; on a GPU the next norm adds.
    """
    has_blocks = order is not None and order.block is not None
    if x.is_cuda or bias is not None or has_blocks or has_kernels(x.device):
        return x, linear(y, weight, bias, gate, order)
    return torch.addmm(x, gate_product(y, gate) if gate else y, weight.t()), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(index)
        ctx.rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (index,) = ctx.saved_tensors
        grad = grads[0]
        total = grad.new_zeros(ctx.rows, *grad.shape[1:])
        return add_rows(total, index, grad), None


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index] for a flat index; the backward pass sums rows instead of sorting indices."""
    return _Gather.apply(x, index)
