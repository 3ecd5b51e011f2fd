"""What a block consists of: a norm, and a layer that reads it and adds its result to the stream.

    T tokens, D width

The residual stream x and the last sublayer's contribution to it, `delta`, are passed separately: on a GPU
the next norm adds them, which saves a pass over memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graft.models.ops import add_linear, add_norm, norm_linear
from graft.models.row_order import RowOrder
from graft.models.shape import ModelShape


class Norm(nn.Module):
    """The weight of a root-mean-square norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """The stream with `delta` added to it, and its norm."""
        return add_norm(x, delta, self.weight, self.eps)


class Sublayer(nn.Module):
    """The norm of a sublayer, and its first and last product."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = Norm(shape.width, shape.norm_eps)
        self.order: RowOrder | None = None

    def norm_linear(
        self, x: Tensor, delta: Tensor | None, linear: nn.Linear, gate: bool = False
    ) -> tuple[Tensor, Tensor]:
        """x + delta, and the product of its norm; with a gate, silu(gate) * up of that product."""
        how = self.norm.weight, self.norm.eps, linear.weight, linear.bias
        return norm_linear(x, delta, *how, self.order, gate)

    def add_linear(
        self, x: Tensor, y: Tensor, linear: nn.Linear, gate: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The stream and its pending addition, of y's product."""
        return add_linear(x, y, linear.weight, linear.bias, gate, self.order)
