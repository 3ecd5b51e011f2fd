"""Where a layer writes its new keys and values, if not to tensors of their own.

pools [layers, 2, pages, K, page, d]; table [rows, P] page numbers; of T new tokens: rows, positions
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVSlots:
    """The slots of T tokens in the pages of an engine."""

    pool: Tensor
    table: Tensor
    rows: Tensor
    """[T] the token's row of the table."""
    positions: Tensor
    """[T] its position in the sequence."""
    lengths: Tensor
    """[rows]; 0: an unused row, nothing is written."""

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k, v [T, K, d] of a layer, in plain PyTorch."""
        size = self.pool.shape[4]
        alive = (self.lengths[self.rows] > 0).nonzero()[:, 0]
        position = self.positions[alive]
        page = self.table[self.rows[alive], position // size].long()
        keys, values = self.pool[layer].unbind(0)
        keys[page, :, position % size] = k[alive]
        values[page, :, position % size] = v[alive]
