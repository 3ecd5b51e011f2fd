"""A gated short convolution: a sum over the last few tokens of a path, and nothing from before them.

b|c|v   one product of the norm, each as wide as the model
sum     b v, convolved over the last tokens
out     a product of c times the sum
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graft.models.kv_slots import KVSlots
from graft.models.layers.attention import Attend
from graft.models.layers.convolution import convolve, draw_convolution
from graft.models.layers.paths import paths_of
from graft.models.layers.sublayer import Sublayer
from graft.models.ops import gather_rows
from graft.models.shape import ModelShape


class ShortConvolution(Sublayer):
    """A gated convolution in place of attention."""

    def __init__(self, shape: ModelShape, index: int) -> None:
        super().__init__(shape)
        assert shape.recurrence is not None
        self.index, sizes = shape.ordinal(index), shape.recurrence
        inputs, _ = sizes.products(shape.width)["in_proj"]
        self.inputs = nn.Linear(shape.width, inputs, bias=sizes.bias)
        self.conv = nn.Parameter(torch.zeros(sizes.channels, 1, sizes.taps))
        self.conv_bias = nn.Parameter(torch.zeros(sizes.channels)) if sizes.conv_bias else None
        self.out = nn.Linear(sizes.value_size, shape.width, bias=sizes.bias)

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """Weights that are no products."""
        draw_convolution(self.conv, generator)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        kv_slots: KVSlots | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The stream and its pending addition; with `rows` [R] only theirs, in this order."""
        x, mixed = self.norm_linear(x, delta, self.inputs)
        b, c, v = mixed.chunk(3, dim=1)
        paths = paths_of(attend, len(x))
        total = convolve(paths, self.index, b * v, self.conv, self.conv_bias, has_silu=False)
        if rows is not None:
            x, c, total = gather_rows(x, rows), gather_rows(c, rows), gather_rows(total, rows)
        return self.add_linear(x, c * total, self.out)
