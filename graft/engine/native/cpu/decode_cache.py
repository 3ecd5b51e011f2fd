"""Keeps the lanes of the last step and lets them go on, or builds new ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from graft.engine.native.cpu.decode_batch import DecodeBatch
from graft.engine.native.cpu.page_layout import PageLayout
from graft.engine.native.kv.sequences import Sequence
from graft.engine.native.kv.siblings import SiblingGroup, by_pages, cut, find_families, limit

KEPT_ELEMENTS = 1 << 26
"""Keys and values that lanes may keep beside the pages, all layers together: 256 MB of float32."""

BUSY = 0.75  # a lane with fewer of its slots in use is built anew

Arranged = list[tuple[list[Sequence], DecodeBatch]]


class DecodeCache:
    """The lanes in use. `arrange` may be given the same sequences step after step."""

    def __init__(self, layout: PageLayout, max_pages: int) -> None:
        self.layout, self.max_pages = layout, max_pages
        self._lanes: list[DecodeBatch] = []
        self._slots: dict[Sequence, tuple[int, int, int]] = {}  # lane, slot, position to come

    def arrange(self, sequences: list[Sequence]) -> Arranged:
        """Every sequence in a lane; the sequences of a lane in the order of its slots."""
        arranged = self._go_on(sequences) or self._build(sequences)
        self._lanes = [lane for _, lane in arranged]
        return arranged

    def clear(self) -> None:
        """Give back what the lanes keep."""
        self._lanes, self._slots = [], {}

    def _go_on(self, sequences: list[Sequence]) -> Arranged | None:
        """The lanes of the last step with those that are left, if all are and none is too long."""
        left: list[list[tuple[int, Sequence]]] = [[] for _ in self._lanes]
        for sequence in sequences:
            place = self._slots.get(sequence)
            if place is None or place[2] != sequence.cached:
                return None  # a newcomer, or one that was dropped in between
            left[place[0]].append((place[1], sequence))
        heads = self.layout.tree.pages.kv_heads
        ready: list[tuple[DecodeBatch, list[Sequence], np.ndarray, np.ndarray]] = []
        for lane, found in zip(self._lanes, left, strict=True):
            if not found:
                continue
            found.sort(key=lambda pair: pair[0])
            slots = np.array([slot for slot, _ in found])
            positions = np.array([sequence.cached for _, sequence in found])
            room = int((positions - lane.starts[slots]).max()) < lane.length
            if not lane.can_advance or not room or len(found) < BUSY * len(lane.starts):
                return None
            ready.append((lane, [sequence for _, sequence in found], slots, positions))
        self._slots = {}
        for number, (lane, members, slots, positions) in enumerate(ready):
            lane.advance(slots, positions, heads)
            for sequence, slot in zip(members, slots.tolist(), strict=True):
                self._slots[sequence] = (number, slot, sequence.cached + 1)
        return [(members, lane) for lane, members, _, _ in ready]

    def _build(self, sequences: list[Sequence]) -> Arranged:
        pages = self.layout.tree.pages
        families, alone = find_families(sequences, pages.size)
        parts: list[
            tuple[list[Sequence], int, Callable[[bool], DecodeBatch]]
        ] = []  # members, pages, maker
        for part in by_pages(alone, self.max_pages):
            size = len(part) * len(part[0].pages)
            parts.append((part, size, lambda keep, part=part: self.layout.lane(part, keep)))
        for like in cut(families, key=lambda family: family.pages):
            for alike in cut(like, key=lambda family: len(family.members)):
                for few in limit(alike, self.max_pages, key=SiblingGroup.num_pages):
                    members = [member for family in few for member in family.members]
                    size = sum(family.num_pages() for family in few)
                    parts.append(
                        (members, size, lambda keep, few=few: self.layout.family_lane(few, keep))
                    )
        per_page = pages.pool[:, :, 0].numel()
        keep = per_page * sum(size for _, size, _ in parts) <= KEPT_ELEMENTS
        self._slots = {
            sequence: (number, slot, sequence.cached + 1)
            for number, (members, _, _) in enumerate(parts)
            for slot, sequence in enumerate(members)
        }
        return [(members, make(keep)) for members, _, make in parts]
