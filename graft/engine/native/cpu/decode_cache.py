"""Keeps the decode batches of the last step and advances them, or builds new ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from graft.engine.native.cpu.decode_batch import DecodeBatch
from graft.engine.native.cpu.page_layout import PageLayout
from graft.engine.native.kv.sequences import Sequence
from graft.engine.native.kv.siblings import (
    SiblingGroup,
    find_sibling_groups,
    split_by_pages,
    split_by_size,
    split_by_total,
)

MAX_KEPT = 1 << 26
"""Elements that decode batches may keep beside the pages, all layers together: 256 MB of float32."""

MIN_USED = 0.75  # a batch with a smaller share of its slots in use is built anew

Arranged = list[tuple[list[Sequence], DecodeBatch]]


class DecodeCache:
    """The decode batches in use. `arrange` may be given the same sequences step after step."""

    def __init__(self, layout: PageLayout, max_pages: int) -> None:
        self.layout, self.max_pages = layout, max_pages
        self._batches: list[DecodeBatch] = []
        self._slots: dict[Sequence, tuple[int, int, int]] = {}  # batch, slot, next position

    def arrange(self, sequences: list[Sequence]) -> Arranged:
        """Every sequence in a batch; the sequences of a batch in the order of its slots."""
        arranged = self._advance(sequences) or self._build(sequences)
        self._batches = [batch for _, batch in arranged]
        return arranged

    def clear(self) -> None:
        """Free what the batches keep."""
        self._batches, self._slots = [], {}

    def _advance(self, sequences: list[Sequence]) -> Arranged | None:
        """The batches of the last step with the remaining sequences; None if they have to be rebuilt."""
        left: list[list[tuple[int, Sequence]]] = [[] for _ in self._batches]
        for sequence in sequences:
            known = self._slots.get(sequence)
            if known is None or known[2] != sequence.cached:
                return None  # a new sequence, or one that lost its pages in between
            left[known[0]].append((known[1], sequence))
        heads = self.layout.tree.pages.kv_heads
        ready: list[tuple[DecodeBatch, list[Sequence], np.ndarray, np.ndarray]] = []
        for batch, found in zip(self._batches, left, strict=True):
            if not found:
                continue
            found.sort(key=lambda pair: pair[0])
            slots = np.array([slot for slot, _ in found])
            positions = np.array([sequence.cached for _, sequence in found])
            has_space = int((positions - batch.starts[slots]).max()) < batch.length
            if not batch.keep or not has_space or len(found) < MIN_USED * len(batch.starts):
                return None
            ready.append((batch, [sequence for _, sequence in found], slots, positions))
        self._slots = {}
        for number, (batch, members, slots, positions) in enumerate(ready):
            batch.advance(slots, positions, heads)
            for sequence, slot in zip(members, slots.tolist(), strict=True):
                self._slots[sequence] = (number, slot, sequence.cached + 1)
        return [(members, batch) for batch, members, _, _ in ready]

    def _build(self, sequences: list[Sequence]) -> Arranged:
        pages = self.layout.tree.pages
        groups, alone = find_sibling_groups(sequences, pages.size)
        parts: list[
            tuple[list[Sequence], int, Callable[[bool], DecodeBatch]]
        ] = []  # members, pages, maker
        for part in split_by_pages(alone, self.max_pages):
            size = len(part) * len(part[0].pages)
            parts.append((part, size, lambda keep, part=part: self.layout.decode_batch(part, keep)))
        for like in split_by_size(groups, key=lambda group: group.pages):
            for alike in split_by_size(like, key=lambda group: len(group.members)):
                for few in split_by_total(alike, self.max_pages, key=SiblingGroup.num_pages):
                    members = [member for group in few for member in group.members]
                    size = sum(group.num_pages() for group in few)
                    parts.append(
                        (members, size, lambda keep, few=few: self.layout.sibling_batch(few, keep))
                    )
        per_page = pages.pool[:, :, 0].numel()
        keep = per_page * sum(size for _, size, _ in parts) <= MAX_KEPT
        self._slots = {
            sequence: (number, slot, sequence.cached + 1)
            for number, (members, _, _) in enumerate(parts)
            for slot, sequence in enumerate(members)
        }
        return [(members, make(keep)) for members, _, make in parts]
