"""Matrix products that add along K in one order, however many rows there are.

    M rows, K inputs, N outputs, weight [N, K]

Libraries divide K between programs where there are few rows, and add the parts up at the end: another order
than with many rows. Here a program has all of K, in steps of BLOCK_K. Few rows take smaller tiles, which is
the same order of adding on a GPU whose instructions fix it; `product_probe` compares.
With a gate the weight is gate|up: half of a program's outputs are columns of gate, the other half the same
columns of up, and it stores their gated product (`kernels.gate`), rounded as if gate|up had been stored.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from graft.models.kernels.gate import gated_product, is_gelu
from graft.models.kernels.launch import after_previous, chained

PROGRAMS = 128
"""About as many as an H200 has multiprocessors (132): fewer leave some idle."""


class Tile(NamedTuple):
    """What one program computes, and how."""

    rows: int
    outputs: int
    inputs: int
    """Of one step along K."""
    warps: int
    stages: int
    """Steps whose inputs are on their way at a time."""


FASTEST = (
    *(Tile(16, 16, 512, 2, 3), Tile(16, 32, 128, 4, 5), Tile(16, 64, 128, 4, 4)),
    *(Tile(64, 16, 256, 4, 4), Tile(64, 32, 128, 4, 4), Tile(64, 64, 128, 4, 4)),
    Tile(128, 128, 64, 8, 3),
)
"""Within 7% of the best of 46 tiles for up to 16 rows, and of 26 for up to 64, on an H200; weights read from
memory."""


def tile_of(rows: int, outputs: int) -> Tile:
    """The largest tile of which there are PROGRAMS, in steps along K that were fastest with it.

    16 rows, 4,096 outputs: 16 x 32, 128 programs
    """
    height = 16 if rows <= 16 else 64 if rows <= 512 else 128
    tiles = [tile for tile in FASTEST if tile.rows == height]
    share = outputs * triton.cdiv(rows, height) // PROGRAMS
    return next((tile for tile in reversed(tiles) if tile.outputs <= share), tiles[0])


def stages_of(tile: Tile, like: Tensor) -> int:
    """Steps under way: half as many in fp32, so that a tile takes the same shared memory."""
    return tile.stages * 2 // max(like.itemsize, 2)


# strides are specialised: one that 16 divides lets rows be copied in vectors, ahead of their use
@triton.jit(do_not_specialize=["rows"])
def _product(
    x,  # [M, K]
    weight,  # [N, K], with a gate [2N, K]
    bias,  # [N] or [2N], or None
    out,  # [M, N], rows `out_stride` apart
    rows, x_stride, out_stride,
    N: tl.constexpr, K: tl.constexpr,
    COLUMNS: tl.constexpr,  # of `out` in a program: BLOCK_N, with a gate half of it
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GELU: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        after_previous()
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = row < rows, output < N * (BLOCK_N // COLUMNS)
    if COLUMNS < BLOCK_N:
        output = output // 2 + output % 2 * N  # of gate and of up in turn
    at_x = x + row.to(tl.int64)[:, None] * x_stride
    at_weight = weight + output.to(tl.int64)[:, None] * K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        inside = (inner < K)[None, :]
        x_rows = tl.load(at_x + inner[None, :], mask=is_row[:, None] & inside, other=0.0)
        weights = tl.load(at_weight + inner[None, :], mask=is_output[:, None] & inside, other=0.0)
        acc = tl.dot(x_rows, tl.trans(weights), acc, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    result = acc.to(out.dtype.element_ty)
    if COLUMNS < BLOCK_N:
        gate, up = tl.split(tl.reshape(result, [BLOCK_M, COLUMNS, 2]))
        result = gated_product(gate.to(tl.float32), up.to(tl.float32), out, GELU)
    at_out = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(at_out, result, mask=is_row[:, None] & (column < N)[None, :])


def fixed_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    gate: str = "",
) -> Tensor:
    """x @ weight.T + bias, [M, N], written to `out` if given; with a gate (silu, gelu_tanh) of gate|up,
    [M, N/2]. No gradient."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    weight = weight.contiguous()
    rows, (outputs, inputs) = len(x), weight.shape
    tile, halves = tile_of(rows, outputs), 2 if gate else 1
    outputs, columns = outputs // halves, tile.outputs // halves
    if out is None:
        out = x.new_empty(rows, outputs)
    _product[(triton.cdiv(outputs, columns), triton.cdiv(rows, tile.rows))](
        x, weight, bias, out, rows, x.stride(0), out.stride(0), N=outputs, K=inputs, COLUMNS=columns,
        BLOCK_M=tile.rows, BLOCK_N=tile.outputs,
        BLOCK_K=min(tile.inputs, triton.next_power_of_2(inputs)),
        GELU=is_gelu(gate), num_warps=tile.warps, num_stages=stages_of(tile, x),
        **chained(x.device),
    )  # fmt: skip
    return out
