"""The norms and the rotation of a layer's heads, as `ops.qk_rotate` and its kernel apply them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class HeadRotation(NamedTuple):
    """How heads become queries and keys: normed if there are weights, then rotated by position."""

    q_weight: Tensor | None
    """[d], for all query heads."""
    k_weight: Tensor | None
    eps: float
    cos: Tensor
    """[T, d/2]: of the angle by which pair (i, i + d/2) of a token's heads is rotated."""
    sin: Tensor
    heads: int
    kv_heads: int
