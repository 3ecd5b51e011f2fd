"""Matrix products for a few rows, fused with the norm or gate before them.

    B rows (at most 4), K inputs, N outputs, weight [N, K]

A decoding step of one row reads every weight once and does little else, so the number of kernels
matters: libraries tile such a product for throughput, and a norm or a gate before it is one more
kernel. Here every program reads a few rows of the weight from end to end and multiplies them element
by element; nothing is exchanged before the sums at the end.

norm    y = (x + delta) / rms * g, then y @ W.T: the product is taken of (x + delta) * g, and divided
        by the rms after the loop, which also sums the squares
gate    silu(gate) * up @ W.T (or gelu), the gate computed as its columns are read
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.models.kernels.gate import exponent, is_gelu

OUTPUTS = 4  # rows of the weight per program
INPUTS = 1024


@triton.jit(do_not_specialize=["eps"])
def _skinny(
    x,  # [B, K], or [B, 2K] with a gate
    delta,  # [B, K]
    norm_weight,  # [K]
    total,  # [B, K]: x + delta
    eps,
    weight,  # [N, K]
    bias,
    out,  # [B, N]
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_GATE: tl.constexpr,
    GELU: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    program = tl.program_id(0)
    row = tl.program_id(1)
    output = program * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < N
    acc = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    squares = tl.zeros([INPUTS], tl.float32)
    at_weight = weight + output.to(tl.int64)[:, None] * K
    dtype = out.dtype.element_ty
    for start in tl.static_range(0, K, INPUTS):
        column = start + tl.arange(0, INPUTS)
        inside = column < K
        w = tl.load(
            at_weight + column[None, :], mask=is_output[:, None] & inside[None, :], other=0.0
        )
        if HAS_GATE:
            gate = tl.load(x + row * (2 * K) + column, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(x + row * (2 * K) + K + column, mask=inside, other=0.0).to(tl.float32)
            active = (gate / (1.0 + tl.exp(-exponent(gate, GELU)))).to(dtype).to(tl.float32)
            v = (active * up).to(dtype).to(tl.float32)
        else:
            v = tl.load(x + row * K + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            if HAS_DELTA:
                v += tl.load(delta + row * K + column, mask=inside, other=0.0).to(tl.float32)
                v = v.to(total.dtype.element_ty).to(tl.float32)
                if program == 0:
                    tl.store(total + row * K + column, v.to(total.dtype.element_ty), mask=inside)
            squares += v * v
            scale = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
            v *= 1 + scale if OFFSET else scale
        acc += w.to(tl.float32) * v[None, :]
    result = tl.sum(acc, 1)
    if HAS_NORM:
        result *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    if HAS_BIAS:
        result += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + row * N + output, result.to(dtype), mask=is_output)


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor | None, Tensor, float, bool] | None = None,
    gate: str = "",
) -> tuple[Tensor, Tensor]:
    """(x + delta, its product with weight) of x [B, K]; norm = (delta, weight, eps, whether the
    weight is the distance from 1).

    With a gate (silu, gelu_tanh) x is gate|up [B, 2K]. No gradient.
    """
    rows = len(x)
    outputs, inputs = weight.shape
    x = x.contiguous()
    out = torch.empty((rows, outputs), dtype=weight.dtype, device=x.device)
    delta, norm_weight, eps, offset = norm or (None, None, 0.0, False)
    total = x if delta is None else torch.empty_like(x)
    _skinny[(triton.cdiv(outputs, OUTPUTS), rows)](
        x,
        x if delta is None else delta,
        x if norm_weight is None else norm_weight,
        total,
        eps,
        weight,
        weight if bias is None else bias,
        out,
        N=outputs,
        K=inputs,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        OFFSET=offset,
        HAS_DELTA=delta is not None,
        HAS_GATE=bool(gate),
        GELU=is_gelu(gate),
        OUTPUTS=OUTPUTS,
        INPUTS=min(INPUTS, triton.next_power_of_2(inputs)),
        num_warps=4,
    )
    return total, out
