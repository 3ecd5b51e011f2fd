"""Page tables, masks and paddings as tensors: the index arithmetic of buckets and decode batches."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graft.engine.native.cpu.attention import Padding
from graft.engine.native.cpu.decode_batch import DecodeBatch, Ints, SharedPrefix
from graft.engine.native.kv.sequences import Sequence, SequenceTree
from graft.engine.native.kv.siblings import SiblingGroup


class PageLayout:
    """Turns sequences of one tree into index tensors; `group_size` query heads share a KV head."""

    def __init__(self, tree: SequenceTree, group_size: int) -> None:
        self.tree, self.group_size = tree, group_size
        self.device = tree.pages.pool.device

    def decode_batch(self, sequences: list[Sequence], keep: bool) -> DecodeBatch:
        """For sequences that share no prefix, or a short one."""
        skip = np.zeros(len(sequences), dtype=np.int64)
        return DecodeBatch(skip, *self._own(sequences, skip), None, keep)

    def sibling_batch(self, groups: list[SiblingGroup], keep: bool) -> DecodeBatch:
        """For siblings: their own pages in the batch, the shared ones in its `prefix`."""
        members = [member for group in groups for member in group.members]
        sizes = np.array([len(group.members) for group in groups])
        pages = np.array([group.pages for group in groups])
        first_members = [group.members[0] for group in groups]
        table = self.table(first_members)[:, : pages.max()]
        bias = None
        if pages.min() < pages.max():
            seen = np.arange(table.shape[1] * self.tree.pages.size) < (
                pages[:, None] * self.tree.pages.size
            )
            bias = self.bias(seen).repeat_interleave(self.tree.pages.kv_heads, 0)[:, None]
        prefix = SharedPrefix(self.padding(sizes), self.tiles(table), bias)
        skip = pages.repeat(sizes)
        return DecodeBatch(skip * self.tree.pages.size, *self._own(members, skip), prefix, keep)

    def table(self, sequences: list[Sequence]) -> Ints:
        """[S, P], padded with `PAD_PAGE`."""
        width = max(len(sequence.pages) for sequence in sequences)
        return self.tree.table[[sequence.row for sequence in sequences], :width]

    def tiles(self, table: Ints) -> Tensor:
        """[S*K, P] of a table [S, P], see `Pages.gather`."""
        heads = self.tree.pages.kv_heads
        tiles = table[:, None] * heads + np.arange(heads)[:, None]
        return self.tensor(tiles.reshape(-1, table.shape[1]))

    def padding(self, counts: Ints) -> Padding:
        rows, m = len(counts), int(counts.max())
        if counts.min() == m:
            return Padding(rows, m, None, None)
        starts = counts.cumsum() - counts
        steps = np.arange(m)
        pick = starts[:, None] + np.minimum(steps, counts[:, None] - 1)
        back = np.flatnonzero(steps < counts[:, None])
        return Padding(rows, m, self.tensor(pick.ravel()), self.tensor(back))

    def bias(self, seen: NDArray[np.bool_]) -> Tensor:
        """0 where seen, -inf elsewhere."""
        return self.tensor(np.where(seen, np.float32(0), np.float32(-np.inf)))

    def tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _own(self, sequences: list[Sequence], skip: Ints) -> tuple[Tensor, Tensor]:
        """Tiles [S*K, P] and bias [S*K, G, L] of the pages after the first `skip` [S] of each."""
        pages = self.tree.pages
        table = self.table(sequences)
        if skip.any():
            held = np.array([len(sequence.pages) for sequence in sequences])
            columns = skip[:, None] + np.arange((held - skip).max())
            inside = columns < held[:, None]
            table = np.where(inside, np.take_along_axis(table, columns * inside, axis=1), 0)
        lengths = np.array([sequence.cached + 1 for sequence in sequences]) - skip * pages.size
        seen = np.arange(table.shape[1] * pages.size) < lengths[:, None]
        bias = self.bias(seen)[:, None, None].expand(-1, pages.kv_heads, self.group_size, -1)
        return self.tiles(table), bias.contiguous().view(-1, self.group_size, bias.shape[-1])
