"""How keys and values are stored: the slots in an engine's pages that a layer writes, and rows in eight bits.

pool [layers, 2, pages, K, page, d]; table [rows, P] page numbers; of T new tokens: rows, positions

A row is the key or value of one token and head. Rounded, its numbers are e4m3 (a sign, four bits of exponent,
three of fraction) times one power of two, the row's scale, stored as bfloat16. The scale puts the largest
number, after rounding, between 128 and 240:

    row      3.1    -0.02     0.0001      largest 3.1 -> 3.0, scale 2 ** -6
    scaled   198.4  -1.28     0.0064
    codes    192    -1.25     0.00586     ties go to the even one; below 2 ** -6 in steps of 2 ** -9
    row      3.0    -0.01953  0.0000916

Products with a power of two are exact, in bfloat16 too: e4m3 has four significant bits. So rounding a rounded
row changes nothing, and what attends to the stored bytes has the bits of what attends to the rounded rows.
The learner rounds as the engine stores; gradients pass as if nothing had been rounded (straight-through).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SCALE_DTYPE = torch.bfloat16

LARGEST = 240.0
"""Of scaled numbers: what rounds above it would leave bfloat16 where the row's scale is the largest."""

LOWEST, HIGHEST = 67, 247
"""Of the exponents of scales, plus 127. The lowest keeps products of weights and scales in the range of
bfloat16: rows of numbers below 2 ** -53 are rounded in steps of 2 ** -69."""

CARRY = 1 << 19
"""Added to the bits of the largest number, it changes the exponent where rounding does: from 1.9375 on."""


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [..., d], bytes, and scales [...] of rows [..., d] in float32 or bfloat16."""
    wide = rows.float()
    largest = (wide.view(torch.int32) & 0x7FFFFFFF).amax(-1)
    exponents = (((largest + CARRY) >> 23) - 7).clamp(LOWEST, HIGHEST)
    scaled = wide * ((254 - exponents) << 23).view(torch.float32)[..., None]
    codes = scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = (exponents << 23).view(torch.float32).masked_fill(largest >= 0x7F800000, torch.nan)
    return codes, scales.to(SCALE_DTYPE)


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows that codes and scales stand for; NaN where a number of the row was not finite."""
    return (codes.view(torch.float8_e4m3fn).float() * scales.float()[..., None]).to(dtype)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:  # type: ignore[override]
        return dequantise(*quantise(rows), rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


def round_rows(rows: Tensor) -> Tensor:
    """Rows [..., d] as they are read after they were stored; the gradient is that of the rows."""
    return _Rounded.apply(rows)


@dataclass(frozen=True, slots=True)
class KVSlots:
    """The slots of T tokens in the pages of an engine."""

    pool: Tensor
    table: Tensor
    rows: Tensor
    """[T] the row of the table that the token belongs to."""
    positions: Tensor
    """[T] its position in the sequence."""
    lengths: Tensor
    """[rows]; 0: an unused row, to which nothing is written."""
    scales: Tensor | None = None
    """[layers, 2, pages, K, page] of a pool that holds codes; see above."""

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k, v [T, K, d] of a layer, in plain PyTorch."""
        size = self.pool.shape[4]
        used = (self.lengths[self.rows] > 0).nonzero()[:, 0]
        position = self.positions[used]
        page = self.table[self.rows[used], position // size].long()
        for which, rows in enumerate((k, v)):
            stored = rows[used]
            if self.scales is not None:
                stored, scales = quantise(stored)
                self.scales[layer, which][page, :, position % size] = scales
            self.pool[layer, which][page, :, position % size] = stored
