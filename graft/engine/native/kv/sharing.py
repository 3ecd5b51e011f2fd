"""Which pages of a batch are read once for several rows.

    B rows, P pages of the longest; table [B, P], padded with PAD_PAGE

    rows    pages                spans read once       tails
    0       1 2 3 | 4 5 | 6      1-3 for rows 0 to 2   6
    1       1 2 3 | 4 5          4-5 for rows 0 and 1  nothing yet
    2       1 2 3 | 7                                  7

Two rows that hold the same page hold the same pages before it, so rows sorted by their pages form a
tree, in which neighbours find_sharing the longest prefixes. Shared pages are full: the page that a sequence
writes to is its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from graft.engine.native.kv.pages import PAD_PAGE

Ints = NDArray[np.int64]

MAX_SLOTS = 15
"""Shared spans of one row; pages after the last of them count as its tail."""
MIN_SAVED_PAGES = 2
"""A span is shared if it saves that many page reads; fewer are served by the hardware caches."""
SPAN_PAGES = (2, 8)
"""Fewest and most pages of a span: short ones spread little work over more programs."""
TILES = (16, 32)
"""Query rows of a kernel's tile, the larger where groups of siblings fill it."""
BUSY = 264
"""Programs that keep a large device busy, two to a multiprocessor."""


@dataclass(slots=True)
class PageSharing:
    """The start of each row's tail, and the spans before it, for rows in `order`."""

    order: Ints
    tails: Ints
    """[B] first page that no span covers."""
    slots: Ints
    """[B] spans that cover the row."""
    items: Ints
    """[n, 5]: first row, rows, first page, last page + 1, slot."""
    tile_rows: int
    """Query rows of a kernel tile."""
    tail_rows: int = 1
    """Rows whose tails one program computes; see `cuda.kernels.segments`."""


def siblings_first(table: Ints) -> Ints:
    """An order of the rows in which those that share pages are neighbours."""
    return np.lexsort(table.T[::-1])


def find_sharing(
    table: Ints,
    group: int,
    kv_heads: int,
    splits: int,
    order: Ints | None = None,
    span_pages: tuple[int, int] = SPAN_PAGES,
    tiles: tuple[int, ...] = TILES,
) -> PageSharing:
    """Spans for the rows of `table`; the first `splits` slots are those of the tails.

    order        of the rows, as `siblings_first` finds it
    span_pages   fewest and most of a span
    tiles        query rows that a kernel's tile may have
    """
    order = siblings_first(table) if order is None else order
    table = table[order]
    spans = _spans(table)
    widest = max((count for _, count, _, _ in spans), default=1)
    tile_rows = next((rows for rows in tiles if rows >= widest * group), tiles[-1])
    most = max(tile_rows // group, 1)  # rows of an item
    num_tiles = sum(-(-count // most) * (stop - start) for _, count, start, stop in spans)
    low, high = span_pages
    longest = max((stop for _, _, _, stop in spans), default=0)
    pages = max(min(num_tiles * kv_heads // BUSY, high), low, -(-longest // (MAX_SLOTS - 3)))
    tails, slots = np.zeros(len(table), dtype=np.int64), np.zeros(len(table), dtype=np.int64)
    items: list[tuple[int, int, int, int, int]] = []
    for first, count, start, stop in spans:  # from the root outwards
        rows = slice(first, first + count)
        used = int(slots[first])
        pieces = range(start, stop, pages)
        if tails[first] != start or used + len(pieces) > MAX_SLOTS:
            continue  # its parent was left out, or no slot is left
        for number, piece in enumerate(pieces):
            end = min(piece + pages, stop)
            items += [
                (row, min(most, first + count - row), piece, end, splits + used + number)
                for row in range(first, first + count, most)
            ]
        tails[rows], slots[rows] = stop, used + len(pieces)
    listed = np.array(items, dtype=np.int64).reshape(-1, 5)
    return PageSharing(order, tails, slots, listed, tile_rows)


def _spans(table: Ints) -> list[tuple[int, int, int, int]]:
    """(first row, rows, first page, last page + 1) of what rows have in common, parents first."""
    same = (table[1:] == table[:-1]) & (table[1:] != PAD_PAGE)
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
            if (count - 1) * (stop - start) < MIN_SAVED_PAGES:
                continue
            spans.append((first, count, start, stop))
        borders = np.flatnonzero(inner == stop) + 1
        edges = [0, *borders.tolist(), count]
        todo += [(first + a, b - a, stop) for a, b in pairwise(edges) if b - a > 1]
    return spans
