"""Matrix products for a few rows, with what comes before them folded in.

    B rows (at most 16), K inputs, N outputs, weight [N, K]

A decoding step of a few rows reads every weight once and does little else, so what counts is how
often the device starts over: libraries tile such a product for throughput, and a norm or a gate in
front of it is one more kernel. Here every program reads a few rows of the weight from end to end.

norm    y = (x + delta) / rms * g, then y @ W.T: the product is taken of (x + delta) * g, and divided
        by the rms behind the loop that also adds up the squares
gate    silu(gate) * up @ W.T, the gate computed as its columns are read
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["rows", "eps"])
def _skinny(
    x,  # [B, K], or [B, 2K] with a gate
    delta,  # [B, K]
    norm_weight,  # [K]
    total,  # [B, K]: x + delta
    eps,
    weight,  # [N, K]
    bias,
    out,  # [B, N]
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_GATE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    row = tl.arange(0, 16)
    output = program * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = row < rows, output < N
    acc = tl.zeros([16, OUTPUTS], tl.float32)
    squares = tl.zeros([16], tl.float32)
    at_weight = weight + output.to(tl.int64)[:, None] * K
    stride = 2 * K if HAS_GATE else K
    for start in tl.range(0, K, INPUTS, num_stages=STAGES):
        column = start + tl.arange(0, INPUTS)
        inside = column < K
        is_here = is_row[:, None] & inside[None, :]
        w = tl.load(
            at_weight + column[None, :], mask=is_output[:, None] & inside[None, :], other=0.0
        )
        at = row[:, None] * stride + column[None, :]
        v = tl.load(x + at, mask=is_here, other=0.0)
        if HAS_GATE:
            up = tl.load(x + at + K, mask=is_here, other=0.0)
            wide = v.to(tl.float32)
            v = (wide / (1.0 + tl.exp(-wide))).to(x.dtype.element_ty) * up
        if HAS_NORM:
            if HAS_DELTA:
                v = (
                    v.to(tl.float32) + tl.load(delta + at, mask=is_here, other=0.0).to(tl.float32)
                ).to(x.dtype.element_ty)
                if program == 0:
                    tl.store(total + at, v, mask=is_here)
            wide = v.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            g = tl.load(norm_weight + column, mask=inside, other=0.0)
            v = (wide * g.to(tl.float32)[None, :]).to(x.dtype.element_ty)
        if EXACT:
            acc = tl.dot(v, tl.trans(w), acc, input_precision="ieee")
        else:
            acc = tl.dot(v, tl.trans(w), acc)
    if HAS_NORM:
        acc *= tl.rsqrt(squares / K + eps)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    at = row[:, None] * N + output[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor | None, Tensor, float] | None = None,
    gate: bool = False,
) -> tuple[Tensor, Tensor]:
    """(x + delta, its product with weight) of x [B, K], B <= 16; norm = (delta, weight, eps).

    With a gate x is gate|up [B, 2K]. No gradient.
    """
    rows = len(x)
    outputs, inputs = weight.shape
    x = x.contiguous()
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    delta, norm_weight, eps = norm or (None, None, 0.0)
    total = x if delta is None else torch.empty_like(x)
    is_exact = x.dtype == torch.float32
    # tuned on an H200: long rows of a small matrix want many programs, a tall one wide tiles
    per_program = 32 if outputs >= 4096 else 16
    _skinny[(triton.cdiv(outputs, per_program),)](
        x,
        x if delta is None else delta,
        x if norm_weight is None else norm_weight,
        total,
        eps,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        N=outputs,
        K=inputs,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        HAS_DELTA=delta is not None,
        HAS_GATE=gate,
        OUTPUTS=per_program,
        INPUTS=64 if is_exact else 256,
        EXACT=is_exact,
        STAGES=2 if is_exact else 4,
        num_warps=4,
    )
    return total, out
