"""What a block consists of: a norm, and a layer that reads it and adds its result to the stream.

    T tokens, D width

The residual stream x and the last sublayer's contribution to it, `delta`, are passed separately: on a GPU
the next norm adds them, which saves a pass over memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graft.models import ops
from graft.models.row_order import RowOrder
from graft.models.shape import ModelShape


class Norm(nn.Module):
    """The weight of a root-mean-square norm, or with `offset` its distance from 1."""

    def __init__(self, size: int, eps: float, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if offset else torch.ones(size))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """The stream with `delta` added to it, and its norm."""
        return ops.add_norm(x, delta, self.weight, self.eps, self.offset)


class Sublayer(nn.Module):
    """The norm of a sublayer, and its first and last product."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = Norm(shape.width, shape.norm_eps, shape.norm_offset)
        self.post_norm = None
        if shape.sandwich:
            self.post_norm = Norm(shape.width, shape.norm_eps, shape.norm_offset)
        self.residual_scale = shape.residual_scale
        self.order: RowOrder | None = None

    def norm_linear(
        self, x: Tensor, delta: Tensor | None, linear: nn.Linear, gate: str = ""
    ) -> tuple[Tensor, Tensor]:
        """x + delta, and the product of its norm; with a gate, the gated product of it."""
        how = self.norm.weight, self.norm.eps, linear.weight, linear.bias
        return ops.norm_linear(x, delta, *how, self.order, gate, self.norm.offset)

    def add_linear(
        self, x: Tensor, y: Tensor, linear: nn.Linear, gate: str = ""
    ) -> tuple[Tensor, Tensor | None]:
        """The stream and its pending addition, of y's product."""
        if self.post_norm is None and self.residual_scale == 1:
            return ops.add_linear(x, y, linear.weight, linear.bias, gate, self.order)
        return x, self.finish(ops.linear(y, linear.weight, linear.bias, gate, self.order))

    def finish(self, result: Tensor) -> Tensor:
        """What is added to the stream for a sublayer's result."""
        if self.post_norm is not None:
            result = self.post_norm(result, None)[1]
        return result if self.residual_scale == 1 else result * self.residual_scale
