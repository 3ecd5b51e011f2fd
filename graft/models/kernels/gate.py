"""silu(gate) * up, or gelu(gate) * up, of gate|up in one matrix; or the clamped gate of experts.

T rows, F width of each half

Both are gate * sigmoid(z): z is the gate itself for silu, and for gelu's approximation by tanh a polynomial
of it, since (1 + tanh(u)) / 2 = sigmoid(2u).
The clamped one is (up + 1) * gate * sigmoid(alpha gate) of both within a limit, and its columns of gate and
up alternate (`ops.clamped_gate`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.models.kernels.launch import after_previous, chained

BLOCK = 1024
WARPS = 4


class Clamp(NamedTuple):
    """What a clamped gate is compiled for."""

    limit: float = 0.0
    """0: the gate is not clamped, and gate and up are halves."""
    alpha: float = 0.0


@triton.jit
def exponent(gate, GELU: tl.constexpr):
    """z, of which the sigmoid is the share of the gate that passes."""
    if GELU:  # 2 sqrt(2 / pi) (gate + 0.044715 gate^3)
        gate = gate * (1.5957691216057308 + 0.07135481282624197 * gate * gate)
    return gate


@triton.jit
def clamp_both(gate, up, LIMIT: tl.constexpr):
    """Gate and up within the limit; what is no number stays none, so that it shows."""
    gate, up = tl.where(gate > LIMIT, LIMIT, gate), tl.where(up > LIMIT, LIMIT, up)
    return gate, tl.where(up < -LIMIT, -LIMIT, up)


@triton.jit
def gated_product(
    gate, up, like,
    GELU: tl.constexpr, LIMIT: tl.constexpr = 0.0, ALPHA: tl.constexpr = 0.0,
):  # fmt: skip
    """The product of fp32 numbers, in the precision that `like` points to, rounded after each step, or
    once with a clamped gate."""
    dtype = like.dtype.element_ty
    if LIMIT > 0:
        gate, up = clamp_both(gate, up, LIMIT)
        product = (up + 1) * (gate * tl.sigmoid(gate * ALPHA))
    else:
        active = (gate * tl.sigmoid(exponent(gate, GELU))).to(dtype).to(tl.float32)
        product = active * up
    return product.to(dtype)


@triton.jit
def _forward(
    gate_up_ptr, out_ptr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        after_previous()
    STEP: tl.constexpr = 2 if LIMIT > 0 else 1
    GAP: tl.constexpr = 1 if LIMIT > 0 else WIDTH
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    source = gate_up_ptr + row * (2 * WIDTH) + column * STEP
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + GAP, mask=inside, other=0.0).to(tl.float32)
    target = out_ptr + row * WIDTH + column
    tl.store(target, gated_product(gate, up, out_ptr, GELU, LIMIT, ALPHA), mask=inside)


@triton.jit
def _backward(
    gate_up_ptr,
    grad_ptr,
    grad_gate_up_ptr,
    gated_ptr,  # [T, F] or None: the result, computed again
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = row * (2 * WIDTH) + column
    gate = tl.load(gate_up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(exponent(gate, GELU))
    if GELU:
        slope = 1.5957691216057308 + 0.21406443847872592 * gate * gate  # of z
        grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid) * slope)
    else:
        grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    dtype = grad_gate_up_ptr.dtype.element_ty
    tl.store(grad_gate_up_ptr + at, grad_gate.to(dtype), mask=inside)
    tl.store(grad_gate_up_ptr + at + WIDTH, (grad * gate * sigmoid).to(dtype), mask=inside)
    if gated_ptr is not None:
        target = gated_ptr + row * WIDTH + column
        tl.store(target, gated_product(gate, up, gated_ptr, GELU), mask=inside)


def gated(gate_up: Tensor, activation: str = "silu", clamp: Clamp = Clamp()) -> Tensor:
    """silu(gate) * up, or with `gelu_tanh` gelu(gate) * up, [T, F]; or the clamped gate."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    grid = (rows, triton.cdiv(width, BLOCK))
    sizes = {"WIDTH": width, "BLOCK": BLOCK, "num_warps": WARPS}
    how = {"GELU": is_gelu(activation), "LIMIT": clamp.limit, "ALPHA": clamp.alpha}
    _forward[grid](gate_up, out, **how, **sizes, **chained(out.device))
    return out


def is_gelu(activation: str) -> bool:
    """The constant that kernels with a gate take."""
    return activation == "gelu_tanh"


def differentiate(
    gate_up: Tensor, grad: Tensor, gated: Tensor | None = None, activation: str = "silu"
) -> Tensor:
    """The gradient of gate|up; the result of `gated` itself is written to `gated`, if given."""
    rows, width = grad.shape
    grad_gate_up = torch.empty_like(gate_up)
    grid = (rows, triton.cdiv(width, BLOCK))
    sizes = {"WIDTH": width, "BLOCK": BLOCK, "num_warps": WARPS}
    _backward[grid](gate_up, grad, grad_gate_up, gated, GELU=is_gelu(activation), **sizes)
    return grad_gate_up
