"""Attention of one step: each bucket of sequences over its pages.

    S sequences of m new tokens each, K key/value heads, G query heads to each of them, d head size,
    P pages of a sequence, L = P * page positions

The G query heads of a group become G more query rows of their key/value head, so keys and values
are never repeated. Buckets are consecutive parts of the flat list of tokens. All of them attend in the
order of `models.tile_attention`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graft.engine.native.kv.pages import PAD_PAGE, Pages
from graft.engine.native.kv.sequences import Sequence, SequenceTree
from graft.models.decoder import Attend
from graft.models.layers.paths import Paths
from graft.models.tile_attention import LANES, attend_rows

Ints = NDArray[np.int64]


class Bucket(Protocol):
    """Some sequences of the step; `tokens` is their number of tokens in the flat list."""

    tokens: int

    def attend(
        self, pages: Pages, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor: ...


def paged(
    pages: Pages, write_rows: Tensor, buckets: list[Bucket], paths: Paths | None = None
) -> Attend:
    """The `attend` of a step: store the new keys and values, then attend bucket by bucket.

    paths   of the step's tokens, in models with recurrent layers
    """
    sizes = [bucket.tokens for bucket in buckets]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        pages.write(layer, write_rows, k, v)
        if len(buckets) == 1:
            return buckets[0].attend(pages, layer, q, k, v, sinks)
        parts = zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        paired = zip(buckets, parts, strict=True)
        return torch.cat([bucket.attend(pages, layer, *qkv, sinks) for bucket, qkv in paired])

    attend.paths = paths  # type: ignore[attr-defined]
    return attend


@dataclass(slots=True)
class Padding:
    """Sequences of unequal length as rows of `m`: a short one repeats its last token.

    lengths [2, 1], m 2: pick [0 1, 2 2] (flat -> padded), back [0 1 2] (padded -> flat)
    """

    rows: int
    m: int
    pick: Tensor | None
    back: Tensor | None

    def pad(self, x: Tensor) -> Tensor:
        """[T, heads, d] -> [S, m, heads, d]"""
        x = x if self.pick is None else x.index_select(0, self.pick)
        return x.view(self.rows, self.m, *x.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        """[S, m, heads, d] -> [T, heads, d]"""
        x = x.reshape(self.rows * self.m, *x.shape[2:])
        return x if self.back is None else x.index_select(0, self.back)


@dataclass(slots=True)
class Extend:
    """Sequences with several new tokens: a prompt, a chunk of it, a tool result."""

    tokens: int
    padding: Padding
    tiles: Tensor
    """[S*K, P], see `Pages.gather`."""
    biases: dict[int, Tensor]
    """By window: [S, 1, G*m, L], 0 or -inf."""

    def attend(
        self, pages: Pages, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        rows, m, heads, size = self.padding.rows, self.padding.m, q.shape[1], q.shape[2]
        group = heads // pages.kv_heads
        q = self.padding.pad(q).view(rows, m, pages.kv_heads, group, size)
        q = q.permute(0, 2, 3, 1, 4).reshape(rows, pages.kv_heads, group * m, size)
        k = pages.gather(layer, 0, self.tiles).view(rows, pages.kv_heads, -1, size)
        v = pages.gather(layer, 1, self.tiles).view(rows, pages.kv_heads, -1, size)
        window = pages.window(layer)
        seen = attend_rows(q, k, v, self.biases[window], window > 0, sinks)
        seen = seen.unflatten(2, (group, m)).permute(0, 3, 1, 2, 4)
        return self.padding.unpad(seen.reshape(rows, m, heads, size))


class PageLayout:
    """Turns sequences of one tree into index tensors; `group_size` query heads share a KV head."""

    def __init__(self, tree: SequenceTree, group_size: int) -> None:
        self.tree, self.group_size = tree, group_size
        self.device = tree.pages.pool.device

    def table(self, sequences: list[Sequence]) -> Ints:
        """[S, P], padded with `PAD_PAGE`."""
        width = max(len(sequence.pages) for sequence in sequences)
        return self.padded(self.tree.table[[sequence.row for sequence in sequences], :width])

    def padded(self, table: Ints) -> Ints:
        """The table with so many columns that they hold a multiple of LANES positions."""
        size, width = self.tree.pages.size, table.shape[1]
        step = math.lcm(size, LANES) // size
        return np.pad(table, ((0, 0), (0, -width % step)), constant_values=PAD_PAGE)

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
