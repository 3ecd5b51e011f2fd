"""Addition to the residual stream and root-mean-square norm, in one pass over memory.

    T rows, D width, P programs

Forward: one program holds one row, so a row is read once for all its sums.
Backward: P programs, as many as the GPU runs at a time, each loop over every P-th row and keep their
own sum of the weight's gradient in registers; P partial sums are added at the end. No atomics: the
same rows give the same bits every time.

Kept for it are the rows of length 1, `unit`, in the weights' precision: half of the memory of a stream in
fp32, and the norm itself is their product with the weight, to the bit.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.models.kernels.launch import after_previous, chained

RESIDENT_WARPS = 32
"""Warps of the backward kernel per multiprocessor: its registers hold them, and they hide memory latency."""


@triton.jit
def _forward(
    x_ptr,  # [T, D]
    delta_ptr,  # [T, D] or None
    weight_ptr,  # [D]
    total_ptr,  # [T, D], written where there is a delta
    normed_ptr,  # [T, D]
    unit_ptr,  # [T, D] or None: no backward pass follows
    rstd_ptr,  # [T]
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OFFSET: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        after_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = row * WIDTH + column
    total = tl.load(x_ptr + at, mask=inside, other=0.0)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + at, mask=inside, other=0.0)
        total = (total.to(tl.float32) + delta.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + at, total, mask=inside)
    wide = total.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    tl.store(rstd_ptr + row, rstd)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if OFFSET:  # stored as the distance from 1
        weight += 1
    # rounded before the weight as well as after, as other implementations in bf16 do
    unit = (wide * rstd).to(normed_ptr.dtype.element_ty)
    if unit_ptr is not None:
        tl.store(unit_ptr + at, unit, mask=inside)
    normed = unit.to(tl.float32) * weight
    tl.store(normed_ptr + at, normed.to(normed_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    grad_total_ptr,  # [T, D] or None
    grad_normed_ptr,  # [T, D]
    unit_ptr,  # [T, D]
    weight_ptr,  # [D]
    rstd_ptr,  # [T]
    grad_x_ptr,  # [T, D]
    grad_delta_ptr,  # [T, D] or None: the same in another precision
    normed_ptr,  # [T, D] or None: the norm, computed again
    partial_ptr,  # [P, D]
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OFFSET: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if OFFSET:  # stored as the distance from 1
        weight += 1
    grad_weight = tl.zeros([BLOCK], tl.float32)
    row = tl.program_id(0).to(tl.int64)
    while row < rows:
        at = row * WIDTH + column
        rstd = tl.load(rstd_ptr + row)
        grad = tl.load(grad_normed_ptr + at, mask=inside, other=0.0).to(tl.float32)
        unit = tl.load(unit_ptr + at, mask=inside, other=0.0).to(tl.float32)
        grad_weight += grad * unit
        if normed_ptr is not None:
            dtype = normed_ptr.dtype.element_ty
            tl.store(normed_ptr + at, (unit * weight).to(dtype), mask=inside)
        grad *= weight
        grad_x = rstd * (grad - unit * (tl.sum(grad * unit, 0) / WIDTH))
        if grad_total_ptr is not None:
            grad_x += tl.load(grad_total_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
        if grad_delta_ptr is not None:
            rounded = grad_x.to(grad_delta_ptr.dtype.element_ty)
            tl.store(grad_delta_ptr + at, rounded, mask=inside)
        row += tl.num_programs(0)
    tl.store(partial_ptr + tl.program_id(0) * WIDTH + column, grad_weight, mask=inside)


@cache
def looping_programs(device: torch.device, warps: int, resident_warps: int) -> int:
    """The number of programs, of `warps` warps each, for a kernel that loops over its rows.

    As many as run at a time: one more would wait until another has finished all its rows.
    """
    if device.type != "cuda":
        return 3  # the interpreter: few, so that each of them loops
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return processors * (resident_warps // warps)


def _block(width: int) -> tuple[int, int]:
    """The power of two that holds a row, and warps for it: 8 numbers a thread, 16 bytes of bf16."""
    block = triton.next_power_of_2(width)
    return block, min(max(block // 256, 1), 16)


def normalise(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    keeps_unit: bool,
    offset: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """x + delta (x itself without a delta), its norm, and for the backward pass: its rows of length 1,
    if `keeps_unit`, and 1 / rms of every row in fp32. With an `offset` the weight is its distance from 1."""
    x = x.contiguous()
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    total = x if delta is None else torch.empty_like(x)
    normed = torch.empty_like(x, dtype=weight.dtype)
    unit = torch.empty_like(normed) if keeps_unit else None
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    block, warps = _block(width)
    _forward[(rows,)](
        x,
        None if delta is None else delta.contiguous(),
        weight,
        total,
        normed,
        unit,
        rstd,
        eps,
        WIDTH=width,
        BLOCK=block,
        OFFSET=offset,
        num_warps=warps,
        **chained(x.device),
    )
    return total, normed, unit, rstd


def differentiate(
    grad_total: Tensor | None,
    grad_normed: Tensor,
    unit: Tensor,
    weight: Tensor,
    rstd: Tensor,
    dtype: torch.dtype,
    normed: Tensor | None = None,
    offset: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, which has this dtype, of delta (the same, in the weight's) and of the weight.

    The norm itself is written to `normed`, if given.
    """
    rows, width = len(rstd), unit.shape[-1]
    block, warps = _block(width)
    programs = min(rows, looping_programs(unit.device, warps, RESIDENT_WARPS))
    grad_x = torch.empty_like(unit, dtype=dtype)
    grad_delta = None
    if dtype != weight.dtype:  # the stream has a higher precision than the delta
        grad_delta = torch.empty_like(unit)
    partial = torch.empty(programs, width, dtype=torch.float32, device=unit.device)
    _backward[(programs,)](
        None if grad_total is None else grad_total.contiguous(),
        grad_normed.contiguous(),
        unit,
        weight,
        rstd,
        grad_x,
        grad_delta,
        normed,
        partial,
        rows,
        WIDTH=width,
        BLOCK=block,
        OFFSET=offset,
        num_warps=warps,
    )
    same = grad_x if grad_delta is None else grad_delta
    return grad_x, same, partial.sum(0).to(weight.dtype)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, offset: bool
    ) -> Any:
        keeps_unit = any(ctx.needs_input_grad)
        total, normed, unit, rstd = normalise(x, delta, weight, eps, keeps_unit, offset)
        ctx.save_for_backward(unit, weight, rstd)
        ctx.dtype, ctx.offset = x.dtype, offset
        ctx.set_materialize_grads(False)
        return normed if delta is None else (total, normed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        unit, weight, rstd = ctx.saved_tensors
        grad_total, grad_normed = grads if len(grads) == 2 else (None, grads[0])
        if grad_normed is None:  # the norm was not used
            grad_delta = None if grad_total is None else grad_total.to(weight.dtype)
            return grad_total, grad_delta, None, None, None
        grad_x, grad_delta, grad_weight = differentiate(
            grad_total, grad_normed, unit, weight, rstd, ctx.dtype, offset=ctx.offset
        )
        return grad_x, grad_delta if len(grads) == 2 else None, grad_weight, None, None


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, offset: bool = False
) -> tuple[Tensor, Tensor]:
    """x + delta and its norm; without a delta the sum is x itself."""
    if delta is None:
        return x, _AddNorm.apply(x, None, weight, eps, offset)
    return _AddNorm.apply(x, delta, weight, eps, offset)
