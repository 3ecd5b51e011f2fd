"""Rows whose bits do not depend on the rows beside them: how a machine's library is made to do that.

    T rows of a flat list of tokens, D width, N rows of a weight

Engine and learner compute the same function of a token and its path, with other tokens beside it: 8 that
decode, or 2,000 of a micro-batch. A library chooses its instructions by the number of rows, and may then
add in another order; the log-probs differ in their last bits. Three measures avoid that:

    least    fewer rows are padded to this number: a product with one row is another routine
    block    products take this many rows at a time, the last ones padded; only where `least` is not enough
    fixed    products of these shapes are our own kernel's (`kernels.fixed_product`) up to some number of
             rows, on a GPU

`order_probe.find_order` finds out on the machine itself which of them hold.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NEVER = sys.maxsize
"""The number of rows from which the library multiplies, where it never does."""


@dataclass(frozen=True, slots=True)
class RowOrder:
    """How rows are computed; see above."""

    least: int = 1
    block: int | None = None
    any_columns: bool = True
    """Whether a product with some rows of the head has the bits of the product with all of them."""
    fixed: Mapping[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """By the shape [N, K] of a weight: from how many rows on the library adds in our own kernel's order."""

    gate_rows: int = 0
    """Rows up to which our own kernel computes the gate of gate|up inside the product."""

    def is_fixed(self, rows: int, weight: Tensor) -> bool:
        """Whether the product of so many rows with this weight is our own kernel's."""
        return rows < self.fixed.get((weight.shape[0], weight.shape[1]), 0)

    def padded(self, x: Tensor) -> Tensor:
        """x [T, ...] with zero rows at the end, if it has too few."""
        missing = self.least - len(x)
        return x if missing <= 0 else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])

    def padded_attend(self, attend: Callable[..., Tensor], count: int) -> Callable[..., Tensor]:
        """`attend` for the first `count` rows; the padding gets zeros."""
        if count >= self.least:
            return attend

        def attend_first(layer: int, q: Tensor, k: Any, v: Any, *sinks: Tensor) -> Tensor:
            return self.padded(attend(layer, q[:count], k[:count], v[:count], *sinks))

        attend_first.inside = attend  # type: ignore[attr-defined]
        return attend_first

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias, [T, N]."""
        if self.is_fixed(len(x), weight):
            from graft.models.kernels.fixed_product import fixed_linear

            return fixed_linear(x, weight, bias)
        count = len(x)
        if self.block is None:
            return F.linear(self.padded(x), weight, bias)[:count]
        x = F.pad(x, (0, 0, 0, -count % self.block))
        parts = [F.linear(part, weight, bias) for part in x.split(self.block)]
        return torch.cat(parts)[:count]
