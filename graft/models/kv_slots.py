"""The positions in an engine's KV pages that a layer writes new keys and values to.

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
    """[T] the row of the table that the token belongs to."""
    positions: Tensor
    """[T] its position in the sequence."""
    lengths: Tensor
    """[rows]; 0: an unused row, to which nothing is written."""

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k, v [T, K, d] of a layer, in plain PyTorch."""
        size = self.pool.shape[4]
        used = (self.lengths[self.rows] > 0).nonzero()[:, 0]
        position = self.positions[used]
        page = self.table[self.rows[used], position // size].long()
        keys, values = self.pool[layer].unbind(0)
        keys[page, :, position % size] = k[used]
        values[page, :, position % size] = v[used]
