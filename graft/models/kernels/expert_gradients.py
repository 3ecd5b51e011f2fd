"""Gradients of the gated MLPs of all experts (`experts`): of the gate, of weights, of biases.

    T tokens, D width, E experts of width F, k chosen for each token, R = T k rows (see `routing`)

The gradient of a row's weight comes from that of `inner`, without the row's result:

    d weight = dot(grad, down inner + bias) = dot(downᵀ grad, inner) + dot(grad, bias)

Gradients of an expert's weights and biases are added over its rows from the first to the last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.models.kernels.fixed_product import fixed_linear
from graft.models.kernels.gate import Clamp, clamp_both, gated_product
from graft.models.kernels.routing import Groups

GRAD_TILE = 32, 64, 64
"""Rows of a step, outputs and inputs of a program, where the gradient of a weight is added up."""

BIAS_TILE = 16, 128
"""Rows of a step and outputs of a program, where the gradient of a bias is."""


@triton.jit
def _gate_backward(
    gate_up,  # [R, 2F] by expert; with a limit columns of gate and up alternate
    grad,  # [R, F] by expert, not weighted
    weights,  # [R] in the rows' own places
    order,
    grad_gate_up, inner,  # inner: times its weight, or None
    grad_weights,
    F: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = 2 if LIMIT > 0 else 1
    GAP: tl.constexpr = 1 if LIMIT > 0 else F
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(order + place)
    weight = tl.load(weights + row)
    total = tl.zeros([BLOCK], tl.float32)
    dtype = grad_gate_up.dtype.element_ty
    for begin in tl.static_range(0, F, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < F
        at = place * (2 * F) + column * STEP
        gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + at + GAP, mask=inside, other=0.0).to(tl.float32)
        of_inner = tl.load(grad + place * F + column, mask=inside, other=0.0).to(tl.float32)
        product = gated_product(gate, up, grad_gate_up, False, LIMIT, ALPHA).to(tl.float32)
        total += of_inner * product
        of_inner *= weight
        if LIMIT > 0:
            passes, up_passes = gate <= LIMIT, (up >= -LIMIT) & (up <= LIMIT)
            gate, up = clamp_both(gate, up, LIMIT)
            sigmoid = tl.sigmoid(gate * ALPHA)
            of_gate = of_inner * (up + 1) * sigmoid * (1.0 + gate * ALPHA * (1.0 - sigmoid))
            of_gate = tl.where(passes, of_gate, 0.0)
            of_up = tl.where(up_passes, of_inner * gate * sigmoid, 0.0)
        else:
            sigmoid = tl.sigmoid(gate)
            of_gate = of_inner * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
            of_up = of_inner * gate * sigmoid
        tl.store(grad_gate_up + at, of_gate.to(dtype), mask=inside)
        tl.store(grad_gate_up + at + GAP, of_up.to(dtype), mask=inside)
        if inner is not None:
            tl.store(inner + place * F + column, (product * weight).to(dtype), mask=inside)
    tl.store(grad_weights + row, tl.sum(total))


def differentiate_gate(
    gate_up: Tensor, grad: Tensor, weights: Tensor, groups: Groups, has_inner: bool, clamp: Clamp
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradient of gate|up, the inner rows times their weights if asked for, and the weights' gradient."""
    rows, width = grad.shape
    grad_gate_up, grad_weights = torch.empty_like(gate_up), torch.empty_like(weights)
    inner = torch.empty_like(grad) if has_inner else None
    _gate_backward[(rows,)](
        gate_up, grad, weights, groups.order, grad_gate_up, inner, grad_weights,
        F=width, BLOCK=min(1024, triton.next_power_of_2(width)),
        LIMIT=clamp.limit, ALPHA=clamp.alpha, num_warps=4,
    )  # fmt: skip
    return grad_gate_up, inner, grad_weights


@triton.jit
def _grad_weight(
    grad,  # rows of N numbers
    x,  # rows of K numbers
    total,  # [E * N, K]
    order, starts,
    N: tl.constexpr, K: tl.constexpr,
    GRAD_SHARE: tl.constexpr, X_SHARE: tl.constexpr,  # as in `experts._multiply`
    IS_SUM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    stop = tl.load(starts + expert + 1)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for begin in tl.range(tl.load(starts + expert), stop, BLOCK_M):
        place = begin + tl.arange(0, BLOCK_M)
        is_row = place < stop
        row = tl.load(order + place, mask=is_row, other=0)
        of_grad = place if GRAD_SHARE == 0 else row // GRAD_SHARE
        of_x = place if X_SHARE == 0 else row // X_SHARE
        at = grad + of_grad.to(tl.int64)[:, None] * N + output[None, :]
        grad_rows = tl.load(at, mask=is_row[:, None] & (output < N)[None, :], other=0.0)
        at = x + of_x.to(tl.int64)[:, None] * K + column[None, :]
        x_rows = tl.load(at, mask=is_row[:, None] & (column < K)[None, :], other=0.0)
        acc = tl.dot(tl.trans(grad_rows), x_rows, acc, input_precision="ieee")
    at = total + (expert.to(tl.int64) * N + output)[:, None] * K + column[None, :]
    mask = (output < N)[:, None] & (column < K)[None, :]
    if IS_SUM:
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, acc.to(total.dtype.element_ty), mask=mask)


def weight_gradient(
    weight: Tensor,
    known: Tensor | None,
    grad: Tensor,
    x: Tensor,
    groups: Groups,
    grad_share: int,
    x_share: int,
) -> Tensor | None:
    """The gradient of a weight [E * N, K]; or None, and it is added to what is `known` of it."""
    total = torch.empty_like(weight) if known is None else known
    outputs, inputs = len(weight) // groups.count, weight.shape[1]
    rows, block_n, block_k = GRAD_TILE
    grid = (triton.cdiv(inputs, block_k), triton.cdiv(outputs, block_n), groups.count)
    _grad_weight[grid](
        grad.contiguous(), x.contiguous(), total, groups.order, groups.starts, N=outputs, K=inputs,
        GRAD_SHARE=grad_share, X_SHARE=x_share, IS_SUM=known is not None,
        BLOCK_M=rows, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip
    return total if known is None else None


@triton.jit
def _grad_bias(
    grad,  # rows of N numbers, sorted by expert; with weights one for SHARE rows
    weights,  # [R] in the rows' own places, or None
    total,  # [E, N]
    order, starts,
    N: tl.constexpr, SHARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < N
    stop = tl.load(starts + expert + 1)
    acc = tl.zeros([BLOCK_N], tl.float32)
    for begin in tl.range(tl.load(starts + expert), stop, BLOCK_M):
        place = begin + tl.arange(0, BLOCK_M)
        is_row = place < stop
        source = place
        if weights is not None:
            row = tl.load(order + place, mask=is_row, other=0)
            source = row // SHARE
        at = grad + source.to(tl.int64)[:, None] * N + column[None, :]
        rows = tl.load(at, mask=is_row[:, None] & inside[None, :], other=0.0).to(tl.float32)
        if weights is not None:
            rows *= tl.load(weights + row, mask=is_row, other=0.0)[:, None]
        acc += tl.sum(rows, 0)
    at = total + expert.to(tl.int64) * N + column
    tl.store(at, acc.to(total.dtype.element_ty), mask=inside)


def bias_gradient(bias: Tensor, grad: Tensor, weights: Tensor | None, groups: Groups) -> Tensor:
    """The gradient of a bias [E * N] by that of each row, sorted by expert, [R, N]; with weights [T, k] by
    that of each token, [T, N]."""
    total = torch.empty_like(bias)
    outputs, (rows, columns) = len(bias) // groups.count, BIAS_TILE
    _grad_bias[(triton.cdiv(outputs, columns), groups.count)](
        grad, weights, total, groups.order, groups.starts, N=outputs, SHARE=groups.top_k,
        BLOCK_M=rows, BLOCK_N=columns,
    )  # fmt: skip
    return total


def dot_with_biases(grad: Tensor, bias: Tensor, groups: Groups) -> Tensor:
    """[T, k]: each token's gradient [T, D] times the biases [E * D] of its experts."""
    of_experts = grad.new_empty(len(grad), groups.count, dtype=torch.float32)
    fixed_linear(grad, bias.view(groups.count, -1), out=of_experts)
    return of_experts.gather(1, groups.chosen.long())
