"""The gated MLPs of all experts in a few launches, and their weighted sum.

    T tokens, D width, E experts of width F, k chosen for each token, R = T k rows (see `routing`)

    inner   [R, F]  silu(gate) * up of gate|up, the product of each row's token with its expert's [2F, D]
    slots   [R, D]  the product with its expert's [D, F], stored by token and slot
    sum     [T, D]  of a token's slots, each times its weight, from the first to the last in fp32

A program has all of K, in steps (see `fixed_product`): a row's bits depend neither on the rows beside it
nor on how many its expert has. Rows are read and written where they belong, so that none is copied for
sorting. In the backward pass the gradient of a weight comes from that of `inner`, without `slots`:

    d weight = dot(grad, down inner) = dot(downᵀ grad, inner)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.models.kernels.chained import after_previous, chained
from graft.models.kernels.fixed_product import Tile
from graft.models.kernels.gate import gated, gated_product
from graft.models.kernels.routing import Groups
from graft.row_sums import grad_sum_of

TILES = {
    tile.rows: tile
    for tile in (Tile(16, 64, 128, 4, 4), Tile(64, 128, 64, 4, 4), Tile(128, 256, 64, 8, 4))
}
"""By their rows: within 4% of the fastest of eight or nine each, for 1 to 8,192 tokens and 128
experts of 768 on an H200, in which weights are read at 3.6 to 4.2 TB/s from 64 tokens on."""

GRAD_TILE = 32, 64, 64
"""Rows of a step, outputs and inputs of a program, where the gradient of a weight is added up."""

SUM_BLOCK = 1024


# strides are specialised: one that 16 divides lets rows be copied in vectors, ahead of their use
@triton.jit
def _multiply(
    x,  # rows of K numbers
    weight,  # output n of expert e and input k at e * weight_size + n * weight_row + k * weight_column
    out,  # rows of N numbers
    order, starts, experts, first,
    x_stride, weight_size, weight_row, weight_column, out_stride,
    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    COLUMNS: tl.constexpr,  # of `out` in a program: BLOCK_N, with a gate half of it
    X_SHARE: tl.constexpr,  # rows of `order` that share a row of x; 0: x is sorted by expert
    IS_SPREAD: tl.constexpr,  # whether `out` is in the rows' own places, not sorted by expert
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        after_previous()
    expert = tl.load(experts + tl.program_id(1))
    if expert < E:
        place = tl.load(first + tl.program_id(1)) + tl.arange(0, BLOCK_M)
        is_row = place < tl.load(starts + expert + 1)
        row = tl.load(order + place, mask=is_row, other=0)
        source = place if X_SHARE == 0 else row // X_SHARE
        target = row if IS_SPREAD else place
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        within = tl.arange(0, BLOCK_N)
        output = tl.program_id(0) * COLUMNS + within % COLUMNS
        is_output = output < N
        output += within // COLUMNS * N  # of gate, then of up
        at_x = x + source.to(tl.int64)[:, None] * x_stride
        at_weight = weight + expert.to(tl.int64) * weight_size + output[:, None] * weight_row
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, K, BLOCK_K):
            inner = start + tl.arange(0, BLOCK_K)
            inside = (inner < K)[None, :]
            x_rows = tl.load(at_x + inner[None, :], mask=is_row[:, None] & inside, other=0.0)
            at = at_weight + inner[None, :] * weight_column
            weights = tl.load(at, mask=is_output[:, None] & inside, other=0.0)
            acc = tl.dot(x_rows, tl.trans(weights), acc, input_precision="ieee")
        result = acc.to(out.dtype.element_ty)
        if COLUMNS < BLOCK_N:
            both = tl.permute(tl.reshape(result, [BLOCK_M, 2, COLUMNS]), [0, 2, 1])
            gate, up = tl.split(both)
            result = gated_product(gate.to(tl.float32), up.to(tl.float32), out, False)
        at_out = out + target.to(tl.int64)[:, None] * out_stride + column[None, :]
        tl.store(at_out, result, mask=is_row[:, None] & (column < N)[None, :])


def multiply(
    x: Tensor,
    weight: Tensor,
    groups: Groups,
    *,
    share: int = 0,
    spread: bool = False,
    gate: bool = False,
    transposed: bool = False,
) -> Tensor:
    """Each row's product with its expert's part of the weight [E * N, K], or with its transpose.

    share       x has one row for as many rows of the groups; 0: a row for each, sorted by expert
    spread      the result is in the rows' own places; else sorted by expert
    gate        the weight is gate|up, and the result silu(gate) * up
    """
    tile = TILES[groups.height]
    outputs, inputs = len(weight) // groups.count, weight.shape[1]
    size, strides = outputs * inputs, (inputs, 1)
    if transposed:
        outputs, inputs, strides = inputs, outputs, (1, inputs)
    outputs, columns = outputs // (1 + gate), tile.outputs // (1 + gate)
    x = x.contiguous()
    out = x.new_empty(len(groups.order), outputs)
    grid = (triton.cdiv(outputs, columns), len(groups.experts))
    _multiply[grid](
        x, weight, out, groups.order, groups.starts, groups.experts, groups.first,
        x.stride(0), size, *strides, out.stride(0), E=groups.count, N=outputs, K=inputs,
        COLUMNS=columns, X_SHARE=share, IS_SPREAD=spread, BLOCK_M=groups.height,
        BLOCK_N=tile.outputs, BLOCK_K=min(tile.inputs, triton.next_power_of_2(inputs)),
        num_warps=tile.warps, num_stages=tile.stages, **chained(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _sum(
    slots,  # [T * k, D]
    weights,  # [T, k] in fp32, or None: all 1
    out,  # [T, D]
    D: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        after_previous()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        at = slots + (token * TOP_K + slot) * D + column
        part = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if weights is not None:
            part *= tl.load(weights + token * TOP_K + slot)
        total += part
    tl.store(out + token * D + column, total.to(out.dtype.element_ty), mask=inside)


def sum_slots(slots: Tensor, weights: Tensor | None, top_k: int) -> Tensor:
    """[T, D]: the sum of each token's slots [T * k, D], weighted in fp32."""
    width = slots.shape[1]
    out = slots.new_empty(len(slots) // top_k, width)
    block = min(SUM_BLOCK, triton.next_power_of_2(width))
    _sum[(len(out), triton.cdiv(width, block))](
        slots, weights, out, D=width, TOP_K=top_k, BLOCK=block, num_warps=4,
        **chained(slots.device),
    )  # fmt: skip
    return out


@triton.jit
def _gate_backward(
    gate_up,  # [R, 2F] by expert
    grad,  # [R, F] by expert, not weighted
    weights,  # [R] in the rows' own places
    order,
    grad_gate_up, inner,  # inner: times its weight, or None
    grad_weights,
    F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(order + place)
    weight = tl.load(weights + row)
    total = tl.zeros([BLOCK], tl.float32)
    dtype = grad_gate_up.dtype.element_ty
    for begin in tl.static_range(0, F, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < F
        at = place * (2 * F) + column
        gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + at + F, mask=inside, other=0.0).to(tl.float32)
        of_inner = tl.load(grad + place * F + column, mask=inside, other=0.0).to(tl.float32)
        product = gated_product(gate, up, grad_gate_up, False).to(tl.float32)
        total += of_inner * product
        of_inner *= weight
        sigmoid = tl.sigmoid(gate)
        of_gate = of_inner * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(grad_gate_up + at, of_gate.to(dtype), mask=inside)
        tl.store(grad_gate_up + at + F, (of_inner * gate * sigmoid).to(dtype), mask=inside)
        if inner is not None:
            tl.store(inner + place * F + column, (product * weight).to(dtype), mask=inside)
    tl.store(grad_weights + row, tl.sum(total))


def _differentiate_gate(
    gate_up: Tensor, grad: Tensor, weights: Tensor, groups: Groups, has_inner: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradient of gate|up, the inner rows times their weights if asked for, and the weights' gradient."""
    rows, width = grad.shape
    grad_gate_up, grad_weights = torch.empty_like(gate_up), torch.empty_like(weights)
    inner = torch.empty_like(grad) if has_inner else None
    _gate_backward[(rows,)](
        gate_up, grad, weights, groups.order, grad_gate_up, inner, grad_weights,
        F=width, BLOCK=min(1024, triton.next_power_of_2(width)), num_warps=4,
    )  # fmt: skip
    return grad_gate_up, inner, grad_weights


@triton.jit
def _grad_weight(
    grad,  # rows of N numbers
    x,  # rows of K numbers
    total,  # [E * N, K]
    order, starts,
    N: tl.constexpr, K: tl.constexpr,
    GRAD_SHARE: tl.constexpr, X_SHARE: tl.constexpr,  # as in `_multiply`
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


def _weight_gradient(
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


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, groups: Groups
    ) -> Tensor:
        rows = multiply(x, gate_up, groups, share=groups.top_k)
        ctx.save_for_backward(x, gate_up, down, weights, rows)
        ctx.groups, ctx.grad_sums = groups, (grad_sum_of(gate_up), grad_sum_of(down))
        # the gate apart: its inputs are kept
        slots = multiply(gated(rows), down, groups, spread=True)
        return sum_slots(slots, weights, groups.top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, gate_up, down, weights, rows = ctx.saved_tensors
        groups: Groups = ctx.groups
        grad, top_k, has = grads[0].contiguous(), ctx.groups.top_k, ctx.needs_input_grad
        of_inner = multiply(grad, down, groups, share=top_k, transposed=True)
        of_rows, inner, of_weights = _differentiate_gate(rows, of_inner, weights, groups, has[2])
        of_x = of_gate_up = of_down = None
        if has[0]:
            slots = multiply(of_rows, gate_up, groups, spread=True, transposed=True)
            of_x = sum_slots(slots, None, top_k)
        if has[1]:
            of_gate_up = _weight_gradient(gate_up, ctx.grad_sums[0], of_rows, x, groups, 0, top_k)
        if inner is not None:
            of_down = _weight_gradient(down, ctx.grad_sums[1], grad, inner, groups, top_k, 0)
        return of_x, of_gate_up, of_down, of_weights, None


def mix_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, groups: Groups
) -> Tensor:
    """[T, D]: the weighted sum of the results of each token's experts."""
    if torch.is_grad_enabled():
        return _Experts.apply(x, gate_up, down, weights, groups)
    inner = multiply(x, gate_up, groups, share=groups.top_k, gate=True)
    return sum_slots(multiply(inner, down, groups, spread=True), weights, groups.top_k)
