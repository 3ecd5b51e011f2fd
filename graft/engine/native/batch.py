"""The work of a step as tensors: one flat list of tokens, cut into buckets of like sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graft.engine.native.attention import Bucket, Decode, Extend, Fresh, Padding, SharedDecode
from graft.engine.native.scheduler import Request, Work
from graft.engine.native.tree import Tree

Item = TypeVar("Item")
Ints = NDArray[np.int64]

SIBLING_PAGES = 4  # a shorter common past is cheaper read once per sibling


@dataclass(slots=True)
class Batch:
    """T tokens of the step; those at `last` [B] are followed by a draw for `requests`."""

    tokens: Tensor
    positions: Tensor
    write_rows: Tensor
    """[T*K], see `Pages.write`."""
    buckets: list[Bucket]
    last: Tensor
    requests: list[Request]


class Batcher:
    """Builds batches for one tree; `group` is how many query heads share a key/value head."""

    def __init__(self, tree: Tree, group: int, gather_limit: int) -> None:
        self.tree, self.group = tree, group
        self.device = tree.pages.pool.device
        self.is_float32 = tree.pages.pool.dtype == torch.float32
        tile = tree.pages.kv_heads * tree.pages.size * tree.pages.head_dim
        self.max_pages = max(gather_limit // tile, 1)  # that one bucket may gather

    def build(self, works: list[Work]) -> Batch:
        order: list[Work] = []
        buckets: list[Bucket] = []
        for part, make in self._parts(works):
            order += part
            buckets.append(make(part))
        counts = np.array([work.count for work in order])
        starts = np.array([work.sequence.cached for work in order])
        rows = np.array([work.sequence.row for work in order])
        ends = counts.cumsum()
        if len(ends) == ends[-1]:  # decode only
            tokens = [work.sequence.tokens[work.sequence.cached] for work in order]
            positions = starts
        else:
            tokens = [
                token
                for work in order
                for token in work.sequence.tokens[
                    work.sequence.cached : work.sequence.cached + work.count
                ]
            ]
            rows = rows.repeat(counts)
            positions = np.arange(ends[-1]) + (starts - ends + counts).repeat(counts)
        size, heads = self.tree.pages.size, self.tree.pages.kv_heads
        page = self.tree.table[rows, positions // size]
        write = (page[:, None] * heads + np.arange(heads)) * size + (positions % size)[:, None]
        draws = [i for i, work in enumerate(order) if work.request is not None]
        return Batch(
            tokens=self._tensor(np.array(tokens)),
            positions=self._tensor(positions),
            write_rows=self._tensor(write.ravel()),
            buckets=buckets,
            last=self._tensor(ends[draws] - 1),
            requests=[work.request for work in order if work.request is not None],
        )

    def _parts(self, works: list[Work]) -> list[tuple[list[Work], Callable[[list[Work]], Bucket]]]:
        """The works in groups that are alike enough to be padded together, each with its maker."""
        parts: list[tuple[list[Work], Callable[[list[Work]], Bucket]]] = []
        single = [w for w in works if w.count == 1 and self.is_float32]
        several = [w for w in works if w.count > 1 or not self.is_float32]
        families, alone = find_families(single, self.tree.pages.size)
        if alone:
            parts += [(part, self._decode) for part in self._by_pages(alone)]
        for like in cut(families, key=lambda f: f.pages):
            for alike in cut(like, key=lambda f: len(f.works)):
                for few in limit(alike, self.max_pages, key=Family.num_pages):
                    members = [work for family in few for work in family.works]
                    parts.append((members, lambda _, few=few: self._shared(few)))
        fresh = [w for w in several if w.sequence.cached == 0]
        parts += [(part, self._fresh) for part in cut(fresh, key=lambda w: w.count)]
        going_on = [w for w in several if w.sequence.cached > 0]
        for part in cut(going_on, key=lambda w: w.count):
            parts += [(narrow, self._extend) for narrow in self._by_pages(part)]
        return parts

    def _by_pages(self, works: list[Work]) -> list[list[Work]]:
        """Parts of similar context length, none of which gathers more than `max_pages`."""
        runs = cut(works, key=lambda w: len(w.sequence.pages))
        pages = [len(run[0].sequence.pages) for run in runs]  # all are padded to the longest
        return [
            part
            for run, longest in zip(runs, pages, strict=True)
            for part in limit(run, self.max_pages, key=lambda _, longest=longest: longest)
        ]

    def _fresh(self, works: list[Work]) -> Bucket:
        counts = np.array([work.count for work in works])
        return Fresh(int(counts.sum()), self._padding(counts))

    def _extend(self, works: list[Work]) -> Bucket:
        counts = np.array([work.count for work in works])
        starts = np.array([work.sequence.cached for work in works])
        table = self._table(works)
        steps = np.minimum(np.arange(counts.max()), counts[:, None] - 1)  # [S, m]
        positions = np.tile(starts[:, None] + steps, (1, self.group))  # [S, G*m]
        seen = np.arange(table.shape[1] * self.tree.pages.size) <= positions[:, :, None]
        bias = self._bias(seen).to(self.tree.pages.pool.dtype)
        return Extend(int(counts.sum()), self._padding(counts), self._tiles(table), bias[:, None])

    def _decode(self, works: list[Work]) -> Bucket:
        zeros = np.zeros(len(works), dtype=np.int64)
        return Decode(len(works), *self._private(works, zeros))

    def _shared(self, families: list[Family]) -> Bucket:
        works = [work for family in families for work in family.works]
        sizes = np.array([len(family.works) for family in families])
        pages = np.array([family.pages for family in families])
        tiles, bias = self._private(works, pages.repeat(sizes))
        table = np.zeros((len(families), pages.max()), dtype=np.int64)
        for row, family in zip(table, families, strict=True):
            row[: family.pages] = family.works[0].sequence.pages[: family.pages]
        shared_bias = None
        if pages.min() < pages.max():
            seen = np.arange(table.shape[1] * self.tree.pages.size) < (
                pages[:, None] * self.tree.pages.size
            )
            shared_bias = self._bias(seen)[:, None, None, None]
        return SharedDecode(
            len(works),
            len(families),
            self._padding(sizes),
            self._tiles(table),
            shared_bias,
            tiles,
            bias,
        )

    def _private(self, works: list[Work], skip: Ints) -> tuple[Tensor, Tensor]:
        """Tiles and bias [S*K, G, L] of the pages after the first `skip` [S] of each sequence."""
        pages = self.tree.pages
        table = self._table(works)
        if skip.any():
            width = max(len(w.sequence.pages) - s for w, s in zip(works, skip, strict=True))
            columns = skip[:, None] + np.arange(width)
            inside = columns < table.shape[1]
            table = np.where(inside, table[np.arange(len(works))[:, None], columns * inside], 0)
        lengths = np.array([work.sequence.cached + 1 for work in works]) - skip * pages.size
        seen = np.arange(table.shape[1] * pages.size) < lengths[:, None]
        bias = self._bias(seen)[:, None, None].expand(-1, pages.kv_heads, self.group, -1)
        return self._tiles(table), bias.reshape(-1, self.group, bias.shape[-1])

    def _table(self, works: list[Work]) -> Ints:
        """[S, P], padded with the page that is nobody's."""
        width = max(len(work.sequence.pages) for work in works)
        return self.tree.table[[work.sequence.row for work in works], :width]

    def _tiles(self, table: Ints) -> Tensor:
        heads = self.tree.pages.kv_heads
        return self._tensor((table[:, None] * heads + np.arange(heads)[:, None]).ravel())

    def _padding(self, counts: Ints) -> Padding:
        rows, m = len(counts), int(counts.max())
        if counts.min() == m:
            return Padding(rows, m, None, None)
        starts = counts.cumsum() - counts
        steps = np.arange(m)
        pick = starts[:, None] + np.minimum(steps, counts[:, None] - 1)
        back = np.flatnonzero(steps < counts[:, None])
        return Padding(rows, m, self._tensor(pick.ravel()), self._tensor(back))

    def _bias(self, seen: NDArray[np.bool_]) -> Tensor:
        return self._tensor(np.where(seen, np.float32(0), np.float32(-np.inf)))

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


@dataclass(slots=True)
class Family:
    """Works whose sequences hold the same first `pages` pages."""

    pages: int
    works: list[Work]

    def num_pages(self) -> int:
        """To read: the common ones, and everybody's own."""
        longest = max(len(work.sequence.pages) for work in self.works)
        return self.pages + len(self.works) * (longest - self.pages)


def find_families(works: list[Work], page_size: int) -> tuple[list[Family], list[Work]]:
    """Siblings that should read their common pages together, and the works left alone.

    A sequence may stand on several stems (a prompt, a fork after a tool); it joins the one where
    most page reads are saved: 8 rows on 20 pages (140) rather than 2 rows on 30 (30). Two sequences
    that hold the same page hold the same pages before it, so a page id names the family.
    """
    choices: list[list[tuple[int, int]]] = []  # per work: (number of shared pages, last of them)
    sizes: dict[int, int] = {}
    for work in works:
        found: list[tuple[int, int]] = []
        stem = work.sequence.stem
        while stem is not None and len(stem.tokens) >= SIBLING_PAGES * page_size:
            pages = len(stem.tokens) // page_size
            last = work.sequence.pages[pages - 1]
            if not found or found[-1][1] != last:  # else a few tokens apart, in one page
                found.append((pages, last))
                sizes[last] = sizes.get(last, 0) + 1
            stem = stem.stem
        choices.append(found)
    families: dict[int, Family] = {}
    alone: list[Work] = []
    for work, found in zip(works, choices, strict=True):
        saved, pages, last = max(
            (((sizes[last] - 1) * pages, pages, last) for pages, last in found), default=(0, 0, 0)
        )
        if saved == 0:
            alone.append(work)
        else:
            families.setdefault(last, Family(pages, [])).works.append(work)
    return list(families.values()), alone


def cut(items: list[Item], key: Callable[[Item], int]) -> list[list[Item]]:
    """Runs of similar size, largest first: padding never more than doubles an item, plus 8.

    sizes 100 60 46 40 15 -> [100 60 46] [40] [15]: 2 * 45 + 8 would be below 100
    """
    runs: list[list[Item]] = []
    largest = 0
    for item in sorted(items, key=key, reverse=True):
        if not runs or 2 * key(item) + 8 < largest:
            runs.append([])
            largest = key(item)
        runs[-1].append(item)
    return runs


def limit(items: list[Item], total: int, key: Callable[[Item], int]) -> list[list[Item]]:
    """Runs whose sizes add up to at most `total`, or that hold a single item."""
    runs: list[list[Item]] = []
    filled = total
    for item in items:
        filled += key(item)
        if filled > total:
            runs.append([])
            filled = key(item)
        runs[-1].append(item)
    return runs
