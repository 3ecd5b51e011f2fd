"""The angles of rotary positions: cos and sin, computed once per device, and what they rotate."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from graft.models.shape import ModelShape, rope_frequencies

LEAST_POSITIONS = 2**16
"""Least number of positions in a GPU's table of angles, even if the model's window is shorter."""

PIECE = 256
"""Positions that a CPU's table grows by. It is computed in such pieces, because the last elements of a
tensor are computed by other instructions than the rest: a position has the same bits in every table."""


class Angles:
    """cos and sin of every position's angles.

    Not a module: its tensors belong to no state dict, and `.to(bfloat16)` must not round them.
    """

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.frequencies: dict[torch.device, tuple[Tensor, float]] = {}
        self.tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def compute(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin in fp32, [T, d/2], of any positions [T]."""
        device = positions.device
        if device not in self.frequencies:
            frequencies, factor = rope_frequencies(self.shape)
            self.frequencies[device] = torch.tensor(frequencies, device=device), factor
        frequency, factor = self.frequencies[device]
        angles = positions.float()[:, None] * frequency
        return angles.cos() * factor, angles.sin() * factor

    def look_up(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The same from a table: two kernels, which a CUDA graph can record once the table exists.

        On a GPU the table has as many positions as the model's window, and at least LEAST_POSITIONS; a
        position beyond it is a device-side error. On a CPU it grows.
        """
        device = positions.device
        if device.type == "cpu":
            cos, sin = self._grown(int(positions.max()) + 1 if len(positions) else 1)
        else:
            if device not in self.tables:
                size = max(self.shape.max_positions, LEAST_POSITIONS)
                self.tables[device] = self.compute(torch.arange(size, device=device))
            cos, sin = self.tables[device]
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def _grown(self, size: int) -> tuple[Tensor, Tensor]:
        """The CPU's table, of at least `size` positions."""
        device = torch.device("cpu")
        known = self.tables.get(device)
        have = 0 if known is None else len(known[0])
        if known is None or size > have:
            starts = range(have, max(size, 2 * have), PIECE)
            pieces = [self.compute(torch.arange(start, start + PIECE)) for start in starts]
            if known is not None:
                pieces.insert(0, known)
            cos, sin = (torch.cat(parts) for parts in zip(*pieces, strict=True))
            known = self.tables[device] = cos, sin
        return known


class HeadRotation(NamedTuple):
    """How heads become queries and keys: normed if there are weights, then rotated by position."""

    q_weight: Tensor | None
    """[d], for all query heads."""
    k_weight: Tensor | None
    eps: float
    cos: Tensor
    """[T, r/2]: of the angle by which pair (i, i + r/2) of a token's heads is rotated; r is d, or less if
    only the beginning of a head is rotated."""
    sin: Tensor
    heads: int
    kv_heads: int
    offset: bool = False
    """Whether the weights are stored as their distance from 1."""
    query_scale: float = 1.0
    """Factor on queries, after their norm."""
    rounds_kv: bool = False
    """Whether keys and values are rounded to eight bits at the end; see `kv_slots`."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What autograd keeps for `with_tensors`."""
        return self.q_weight, self.k_weight, self.cos, self.sin

    def without_tensors(self) -> HeadRotation:
        return self.with_tensors(*[None] * 4)

    def with_tensors(self, q_weight: Any, k_weight: Any, cos: Any, sin: Any) -> HeadRotation:
        return self._replace(q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin)

    def head_weights(self) -> Tensor:
        """[H+K, d]: what normed queries and keys are multiplied by."""
        assert self.q_weight is not None and self.k_weight is not None
        q_weight, k_weight = self.q_weight, self.k_weight
        if self.offset:
            q_weight, k_weight = 1 + q_weight, 1 + k_weight
        if self.query_scale != 1:
            q_weight = q_weight * self.query_scale
        return torch.cat([q_weight.expand(self.heads, -1), k_weight.expand(self.kv_heads, -1)])
