"""The gated MLP: down(silu(gate(x)) * up(x)), or with gelu, with gate|up stored row-concatenated; and one
without a gate: down(relu(up(x))²)."""

from __future__ import annotations

from torch import Tensor, nn

from graft.models.layers.sublayer import Sublayer
from graft.models.ops import can_gate_inside
from graft.models.shape import ModelShape


class GatedMLP(Sublayer):
    """The MLP that every token passes through."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.activation = shape.activation
        self.gate_up = nn.Linear(shape.width, 2 * shape.ff, bias=shape.mlp_bias)
        self.down = nn.Linear(shape.ff, shape.width, bias=shape.mlp_bias)

    def forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The stream and its pending addition."""
        inside = self.activation if can_gate_inside(x, self.order) else ""
        x, inner = self.norm_linear(x, delta, self.gate_up, gate=inside)
        return self.add_linear(x, inner, self.down, gate="" if inside else self.activation)


class PlainMLP(Sublayer):
    """The MLP of families without gates."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.up = nn.Linear(shape.width, shape.ff, bias=shape.mlp_bias)
        self.down = nn.Linear(shape.ff, shape.width, bias=shape.mlp_bias)

    def forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The stream and its pending addition."""
        x, inner = self.norm_linear(x, delta, self.up)
        return self.add_linear(x, inner.relu().square(), self.down)


def make_mlp(shape: ModelShape) -> GatedMLP | PlainMLP:
    return GatedMLP(shape) if shape.is_gated else PlainMLP(shape)
