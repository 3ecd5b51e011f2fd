"""The positions in an engine's KV pages that a layer writes new keys and values to.

pool [layers, 2, pages, K, page, d]; table [rows, P] page numbers; of T new tokens: rows, positions
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from graft.models.kv_rounding import quantise


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
    scales: Tensor | None = None
    """[layers, 2, pages, K, page] of a pool that holds codes; see `kv_rounding`."""

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k, v [T, K, d] of a layer, in plain PyTorch."""
        size = self.pool.shape[4]
        used = (self.lengths[self.rows] > 0).nonzero()[:, 0]
        position = self.positions[used]
        page = self.table[self.rows[used], position // size].long()
        for which, rows in enumerate((k, v)):
            stored = rows[used]
            if self.scales is not None:
                stored, scales = quantise(stored)
                self.scales[layer, which][page, :, position % size] = scales
            self.pool[layer, which][page, :, position % size] = stored
