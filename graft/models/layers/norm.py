"""The root-mean-square norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graft.models.ops import add_norm


class Norm(nn.Module):
    """The weight of a root-mean-square norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """The stream with `delta` added to it, and its norm."""
        return add_norm(x, delta, self.weight, self.eps)
