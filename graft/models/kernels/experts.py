"""The gated MLPs of all experts in a few launches, and their weighted sum.

    T tokens, D width, E experts of width F, k chosen for each token, R = T k rows (see `routing`)

    inner   [R, F]  silu(gate) * up of gate|up, the product of each row's token with its expert's [2F, D]
    slots   [R, D]  the product with its expert's [D, F], stored by token and slot
    sum     [T, D]  of a token's slots, each times its weight, from the first to the last in fp32

A program has all of K, in steps (see `fixed_product`): a row's bits depend neither on the rows beside it
nor on how many its expert has. Rows are read and written where they belong, so that none is copied for
sorting. A bias is added to the sum in fp32, before it is rounded. In the products of a program the columns
of gate and up alternate; with a clamped gate they do in the weight too (see `gate`). The gradients are those
of `expert_gradients`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.models.kernels.expert_gradients import (
    bias_gradient,
    differentiate_gate,
    dot_with_biases,
    weight_gradient,
)
from graft.models.kernels.fixed_product import Tile, stages_of
from graft.models.kernels.gate import Clamp, gated, gated_product
from graft.models.kernels.launch import after_previous, chained
from graft.models.kernels.routing import Groups
from graft.row_sums import grad_sum_of

TILES = {
    1: Tile(16, 64, 256, 4, 3),
    16: Tile(16, 128, 128, 4, 3),
    32: Tile(32, 128, 128, 4, 3),
    64: Tile(64, 128, 64, 4, 4),
    128: Tile(128, 256, 64, 8, 3),
}
"""By the rows of a group: within 3% of the fastest of 5 to 15 each with 128 experts of 768 on an H200, for 1
to 8,192 tokens; weights are read at 4.0 to 4.4 TB/s by 8 to 512."""

SUM_BLOCK = 1024


# strides are specialised: one that 16 divides lets rows be copied in vectors, ahead of their use
@triton.jit
def _multiply(
    x,  # rows of K numbers
    weight,  # output n of expert e and input k at e * weight_size + n * weight_row + k * weight_column
    bias,  # one for each output of each expert, or None
    out,  # rows of N numbers
    order, starts, experts, first,  # see `Groups`
    x_stride, weight_size, weight_row, weight_column, out_stride,
    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    COLUMNS: tl.constexpr,  # of `out` in a program: BLOCK_N, with a gate half of it
    X_SHARE: tl.constexpr,  # rows of `order` that share a row of x; 0: x is sorted by expert
    IS_SPREAD: tl.constexpr,  # whether `out` is in the rows' own places, not sorted by expert
    LIMIT: tl.constexpr, ALPHA: tl.constexpr,  # of a clamped gate, if LIMIT > 0
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        after_previous()
    expert = tl.load(experts + tl.program_id(1))
    if expert < E:
        if order is None:
            place = tl.program_id(1) + tl.arange(0, BLOCK_M)
            is_row = place == tl.program_id(1)
            row = place
        else:
            place = tl.load(first + tl.program_id(1)) + tl.arange(0, BLOCK_M)
            is_row = place < tl.load(starts + expert + 1)
            row = tl.load(order + place, mask=is_row, other=0)
        source = place if X_SHARE == 0 else row // X_SHARE
        target = row if IS_SPREAD else place
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_output = output < N * (BLOCK_N // COLUMNS)
        # gate and up are halves of the weight, and alternate here
        if COLUMNS < BLOCK_N and LIMIT == 0:
            output = output // 2 + output % 2 * N
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
        if bias is not None:
            at_bias = bias + expert * (N * (BLOCK_N // COLUMNS)) + output
            acc += tl.load(at_bias, mask=is_output, other=0.0).to(tl.float32)[None, :]
        result = acc.to(out.dtype.element_ty)
        if COLUMNS < BLOCK_N:
            # halves side by side would have to change places here, for which ptxas orders all products
            gate, up = tl.split(tl.reshape(result, [BLOCK_M, COLUMNS, 2]))
            gate, up = gate.to(tl.float32), up.to(tl.float32)
            result = gated_product(gate, up, out, False, LIMIT, ALPHA)
        at_out = out + target.to(tl.int64)[:, None] * out_stride + column[None, :]
        tl.store(at_out, result, mask=is_row[:, None] & (column < N)[None, :])


def multiply(
    x: Tensor,
    weight: Tensor,
    groups: Groups,
    *,
    bias: Tensor | None = None,
    share: int = 0,
    spread: bool = False,
    gate: Clamp | None = None,
    transposed: bool = False,
) -> Tensor:
    """Each row's product with its expert's part of the weight [E * N, K], or with its transpose.

    bias        [E * N], added
    share       x has one row for as many rows of the groups; 0: a row for each, sorted by expert
    spread      the result is in the rows' own places; else sorted by expert
    gate        the weight is gate|up, and the result their gated product
    """
    tile = TILES[groups.height]
    outputs, inputs = len(weight) // groups.count, weight.shape[1]
    size, strides = outputs * inputs, (inputs, 1)
    if transposed:
        outputs, inputs, strides = inputs, outputs, (1, inputs)
    halves = 1 if gate is None else 2
    outputs, columns = outputs // halves, tile.outputs // halves
    limit, alpha = gate or (0.0, 0.0)
    x = x.contiguous()
    out = x.new_empty(groups.chosen.numel(), outputs)
    grid = (triton.cdiv(outputs, columns), len(groups.experts))
    _multiply[grid](
        x, weight, bias, out, groups.order, groups.starts, groups.experts, groups.first,
        x.stride(0), size, *strides, out.stride(0), E=groups.count, N=outputs, K=inputs,
        COLUMNS=columns, X_SHARE=share, IS_SPREAD=spread, LIMIT=limit, ALPHA=alpha,
        BLOCK_M=tile.rows, BLOCK_N=tile.outputs,
        BLOCK_K=min(tile.inputs, triton.next_power_of_2(inputs)),
        num_warps=tile.warps, num_stages=stages_of(tile, x), **chained(x.device),
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


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor,
        groups: Groups,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        clamp: Clamp,
    ) -> Tensor:
        rows = multiply(x, gate_up, groups, bias=gate_up_bias, share=groups.top_k)
        ctx.save_for_backward(x, gate_up, down, weights, rows, gate_up_bias, down_bias)
        ctx.groups, ctx.grad_sums = groups, (grad_sum_of(gate_up), grad_sum_of(down))
        ctx.clamp = clamp
        # the gate apart: its inputs are kept
        slots = multiply(gated(rows, clamp=clamp), down, groups, bias=down_bias, spread=True)
        return sum_slots(slots, weights, groups.top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, gate_up, down, weights, rows, gate_up_bias, down_bias = ctx.saved_tensors
        groups: Groups = ctx.groups
        grad, top_k, has = grads[0].contiguous(), ctx.groups.top_k, ctx.needs_input_grad
        of_inner = multiply(grad, down, groups, share=top_k, transposed=True)
        of_rows, inner, of_weights = differentiate_gate(
            rows, of_inner, weights, groups, has[2], ctx.clamp
        )
        if down_bias is not None and has[3]:
            of_weights += dot_with_biases(grad, down_bias, groups)
        of_x = of_gate_up = of_down = of_gate_up_bias = of_down_bias = None
        if has[0]:
            slots = multiply(of_rows, gate_up, groups, spread=True, transposed=True)
            of_x = sum_slots(slots, None, top_k)
        if has[1]:
            of_gate_up = weight_gradient(gate_up, ctx.grad_sums[0], of_rows, x, groups, 0, top_k)
        if inner is not None:
            of_down = weight_gradient(down, ctx.grad_sums[1], grad, inner, groups, top_k, 0)
        if has[5]:
            of_gate_up_bias = bias_gradient(gate_up_bias, of_rows, None, groups)
        if has[6]:
            of_down_bias = bias_gradient(down_bias, grad, weights, groups)
        of_biases = of_gate_up_bias, of_down_bias
        return of_x, of_gate_up, of_down, of_weights, None, *of_biases, None


def mix_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    groups: Groups,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    clamp: Clamp = Clamp(),
) -> Tensor:
    """[T, D]: the weighted sum of the results of each token's experts."""
    if torch.is_grad_enabled():
        others = gate_up_bias, down_bias, clamp
        return _Experts.apply(x, gate_up, down, weights, groups, *others)
    inner = multiply(x, gate_up, groups, bias=gate_up_bias, share=groups.top_k, gate=clamp)
    slots = multiply(inner, down, groups, bias=down_bias, spread=True)
    return sum_slots(slots, weights, groups.top_k)
