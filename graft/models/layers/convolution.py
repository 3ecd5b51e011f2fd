"""A causal convolution of each channel over the last few tokens of a path."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.models.layers.paths import Paths
from graft.models.ops import elementwise


def convolve(
    paths: Paths,
    layer: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    has_silu: bool = True,
) -> Tensor:
    """The sum of x [T, channels] of each token and of those before it, times `weight` [channels, 1, taps].

    x 1, 2, 4 with taps .5, 1: 1, 2.5, 5. Terms are added from the oldest token to the newest.
    """
    taps = weight.shape[2]
    count = len(x)
    total = x * weight[:, 0, -1]
    if taps > 1:
        before = paths.before(layer, x[: paths.count], taps - 1)
        if len(before) < count:
            before = F.pad(before, (0, 0, 0, 0, 0, count - len(before)))
        older = before[:, 0] * weight[:, 0, 0]
        for tap in range(1, taps - 1):
            older = older + before[:, tap] * weight[:, 0, tap]
        total = older + total
    if bias is not None:
        total = total + bias
    return elementwise(F.silu, total) if has_silu else total


@torch.no_grad()
def draw_convolution(weight: Tensor, generator: torch.Generator) -> None:
    """Fill the weights [channels, 1, taps] with normal numbers of variance 1/taps."""
    drawn = torch.randn(weight.shape, generator=generator, device=generator.device)
    weight.copy_(drawn / weight.shape[2] ** 0.5)
