"""The work of a step as tensors: one flat list of tokens in buckets of like sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graft.engine.native.cpu.attention import Bucket, Extend, PageLayout
from graft.engine.native.cpu.decode_batch import DecodeCache
from graft.engine.native.cpu.recurrence import StateCache, StepPaths
from graft.engine.native.drafts.verification import DrawPlace, places_of
from graft.engine.native.kv.sequences import Sequence, SequenceTree
from graft.engine.native.kv.siblings import split_by_pages, split_by_size
from graft.engine.native.scheduler import PlannedWork


@dataclass(slots=True)
class StepBatch:
    """T tokens of the step; after each of those at `last` [B] comes a draw at one of `places`."""

    tokens: Tensor
    positions: Tensor
    write_rows: Tensor
    """[T*K], see `Pages.write`."""
    buckets: list[Bucket]
    last: Tensor
    places: list[DrawPlace]
    paths: StepPaths | None = None
    """In models with recurrent layers."""


class StepBatcher:
    """Builds batches for one tree; a bucket gathers at most `gather_limit` elements of keys."""

    def __init__(self, tree: SequenceTree, group_size: int, gather_limit: int) -> None:
        self.tree = tree
        self.layout = PageLayout(tree, group_size)
        page = tree.pages.kv_heads * tree.pages.size * tree.pages.head_dim
        self.max_pages = max(gather_limit // page, 1)
        self.decode_cache = DecodeCache(self.layout, self.max_pages)
        self.state_cache = None if tree.states is None else StateCache(tree.states)
        # lower precisions use the fused kernels, which sum in float32
        self.has_decode_batches = tree.pages.dtype == torch.float32
        self.has_windows = any(tree.pages.windows)

    def clear(self) -> None:
        """Free what is kept between steps."""
        self.decode_cache.clear()
        if self.state_cache is not None:
            self.state_cache.clear()

    def build(self, works: list[PlannedWork]) -> StepBatch:
        work_of = {work.sequence: work for work in works}
        counts = {work.sequence: work.num_tokens for work in works}
        order: list[Sequence] = []
        buckets: list[Bucket] = []
        for members, bucket in self._buckets(work_of):
            order += members
            buckets.append(bucket)
        count = np.array([counts[sequence] for sequence in order])
        start = np.array([sequence.cached for sequence in order])
        row = np.array([sequence.row for sequence in order])
        end = count.cumsum()
        if len(order) == end[-1]:  # decode only
            tokens = [sequence.tokens[sequence.cached] for sequence in order]
            position = start
        else:
            tokens = [token for sequence in order for token in work_of[sequence].tokens]
            row = row.repeat(count)
            position = np.arange(end[-1]) + (start - end + count).repeat(count)
        size, heads = self.tree.pages.size, self.tree.pages.kv_heads
        page = self.tree.table[row, position // size]
        write = (page[:, None] * heads + np.arange(heads)) * size + (position % size)[:, None]
        places: list[DrawPlace] = []
        last: list[int] = []
        for sequence, stop in zip(order, end.tolist(), strict=True):
            work = work_of[sequence]
            if work.request is not None:
                places += places_of(work.request, work.draft)
                last += range(stop - 1 - work.num_tokens + work.count, stop)
        cache = self.state_cache
        return StepBatch(
            paths=None if cache is None else cache.paths(order, count.tolist()),
            tokens=self.layout.tensor(np.array(tokens)),
            positions=self.layout.tensor(position),
            write_rows=self.layout.tensor(write.ravel()),
            buckets=buckets,
            last=self.layout.tensor(np.array(last, dtype=np.int64)),
            places=places,
        )

    def _buckets(self, work_of: dict[Sequence, PlannedWork]) -> list[tuple[list[Sequence], Bucket]]:
        """The sequences in groups of similar length, which are padded together."""
        counts = {sequence: work.num_tokens for sequence, work in work_of.items()}
        single: list[Sequence] = []
        several: list[Sequence] = []
        for sequence, work in work_of.items():
            is_decoding = work.count == 1 and (work.draft is None or not self.has_windows)
            (single if is_decoding and self.has_decode_batches else several).append(sequence)
        buckets: list[tuple[list[Sequence], Bucket]] = []
        buckets += self.decode_cache.arrange(single, [counts[s] for s in single])
        for like in split_by_size(several, key=lambda s: counts[s]):
            for part in split_by_pages(like, self.max_pages):
                buckets.append((part, self._extend(part, [counts[s] for s in part])))
        return buckets

    def _extend(self, sequences: list[Sequence], counts: list[int]) -> Extend:
        count = np.array(counts)
        start = np.array([sequence.cached for sequence in sequences])
        table = self.layout.table(sequences)
        position = np.tile(
            start[:, None] + np.arange(count.max()), (1, self.layout.group_size)
        )  # [S, G*m]
        pages, tiles = self.tree.pages, self.layout.tiles(table)
        back = position[:, :, None] - np.arange(table.shape[1] * pages.size)
        biases: dict[int, Tensor] = {}
        for window in set(pages.windows or (0,)):
            seen = (back >= 0) & (back < window) if window else back >= 0
            biases[window] = self.layout.bias(seen)[:, None].to(pages.dtype)
        return Extend(int(count.sum()), self.layout.padding(count), tiles, biases)
