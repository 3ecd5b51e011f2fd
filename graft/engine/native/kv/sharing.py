"""Which pages of a batch are read once for several rows.

    B rows, P pages of the longest; table [B, P], padded with NOBODY

    rows    pages                spans read once       tails
    0       1 2 3 | 4 5 | 6      1-3 for rows 0 to 2   6
    1       1 2 3 | 4 5          4-5 for rows 0 and 1  nothing yet
    2       1 2 3 | 7                                  7

Two rows that hold the same page hold the same pages before it, so rows sorted by their pages make
a tree: neighbours with a long common beginning meet deep in it. Shared pages are full: a sequence
that writes has its last page to itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from graft.engine.native.kv.pages import NOBODY

Ints = NDArray[np.int64]

MOST_SLOTS = 15
"""Spans on one row's way from the root; what lies behind counts as its tail."""
WORTH_PAGES = 2
"""A span is shared if that many page reads are saved; below, the caches serve as well."""
SPAN_PAGES = (2, 8)
"""Pages of a span: at least so many where work is scarce, at most so many where it is not."""
BUSY = 264
"""Programs that keep a large device busy, two to a multiprocessor."""


@dataclass(slots=True)
class PageSharing:
    """For rows in `order`: where each one's tail begins, and the spans before it."""

    order: Ints
    tails: Ints
    """[B] first page that no span covers."""
    slots: Ints
    """[B] spans that cover the row."""
    items: Ints
    """[n, 5]: first row, rows, first page, last page + 1, slot."""
    lines: int
    """Query lines per item: 16, or 32 where larger families make use of them."""


def share(table: Ints, group: int, kv_heads: int, splits: int) -> PageSharing:
    """Spans for the rows of `table`; `splits` slots come before theirs, for the tails."""
    order = np.lexsort(table.T[::-1])
    table = table[order]
    spans = _spans(table)
    widest = max((count for _, count, _, _ in spans), default=1)
    lines = 32 if widest * group > 16 else 16
    most = max(lines // group, 1)  # rows of an item
    tiles = sum(-(-count // most) * (stop - start) for _, count, start, stop in spans)
    low, high = SPAN_PAGES
    longest = max((stop for _, _, _, stop in spans), default=0)
    pages = max(min(tiles * kv_heads // BUSY, high), low, -(-longest // (MOST_SLOTS - 3)))
    tails, slots = np.zeros(len(table), dtype=np.int64), np.zeros(len(table), dtype=np.int64)
    items: list[tuple[int, int, int, int, int]] = []
    for first, count, start, stop in spans:  # from the root outwards
        rows = slice(first, first + count)
        used = int(slots[first])
        pieces = range(start, stop, pages)
        if tails[first] != start or used + len(pieces) > MOST_SLOTS:
            continue  # its parent was left out, or it has no slot to write to
        for number, piece in enumerate(pieces):
            end = min(piece + pages, stop)
            items += [
                (row, min(most, first + count - row), piece, end, splits + used + number)
                for row in range(first, first + count, most)
            ]
        tails[rows], slots[rows] = stop, used + len(pieces)
    listed = np.array(items, dtype=np.int64).reshape(-1, 5)
    return PageSharing(order, tails, slots, listed, lines)


def _spans(table: Ints) -> list[tuple[int, int, int, int]]:
    """(first row, rows, first page, last page + 1) of what rows have in common, parents first."""
    same = (table[1:] == table[:-1]) & (table[1:] != NOBODY)
    common = np.minimum.accumulate(same, axis=1).sum(axis=1)  # pages shared with the next row
    spans: list[tuple[int, int, int, int]] = []
    todo = [(0, len(table), 0)]
    while todo:
        first, count, start = todo.pop()
        if count < 2:
            continue
        inner = common[first : first + count - 1]
        stop = int(inner.min())
        if stop > start:
            if (count - 1) * (stop - start) < WORTH_PAGES:
                continue
            spans.append((first, count, start, stop))
        borders = np.flatnonzero(inner == stop) + 1
        edges = [0, *borders.tolist(), count]
        todo += [(first + a, b - a, stop) for a, b in pairwise(edges) if b - a > 1]
    return spans
