"""Which segments of a batch are read once for several rows, where attention adds in the order of positions.

    B rows, P pages of the longest; table [B, P]; a segment is SEGMENT pages

    rows    pages, segments of 4              items                                    tails
    0       1 2 3 4 | 5 6 7 8                 segment 0 for rows 0 to 2                segment 2
    1       1 2 3 4 | 5 6 9 10 | 11           segment 1 for rows 0 and 1, which        segment 2
    2       1 2 3 4 | 12                      share two pages of it                    segment 1

A segment is one softmax, so it is not divided: whole ones are shared as pages are in `sharing`, and one that
rows only begin together is an item that goes on with the pages of each (`cuda.kernels.segments`).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from graft.engine.native.kv.pages import PAD_PAGE
from graft.engine.native.kv.sharing import TILES, Ints, PageSharing, find_sharing, siblings_first
from graft.models.tree.path_blocks import BLOCK, SEGMENT

PROGRAMS = 128
"""About as many as an H200 has multiprocessors (132): programs have fewer rows where there would be less."""
LARGE_TILE = 64
"""Query rows of a tile where that leaves a program for each: 8 to 21% less time than 32 with 16 samples of a
prompt and 8 query heads to one of keys; with fewer rows it takes longer."""
MAX_TAIL_ROWS = 8
"""Where 16 fit in a tile, as many programs as multiprocessors are left, and these wait for the longest."""
PROGRAM_TURNS = 2
"""A program takes as long as so many turns of a row that has no page left, on an H200."""
MIN_GAIN = 0.9
"""Of the turns with a program for each tail: every other number of rows is a graph of its own."""


def share_segments(table: Ints, lengths: Ints, group: int, kv_heads: int) -> PageSharing:
    """`find_sharing` of whole segments, and of those that siblings begin together: tails and items count
    segments instead of pages. `lengths` [B] are those of the rows at the beginning of a burst."""
    padding = -table.shape[1] % SEGMENT
    table = np.pad(table, ((0, 0), (0, padding)), constant_values=PAD_PAGE)
    order = _longest_first(table, siblings_first(table), lengths)
    # who shares the last page of a segment shares all of it
    is_large = len(table) * group * kv_heads >= PROGRAMS * LARGE_TILE
    tiles = (*TILES, LARGE_TILE) if is_large else TILES
    sharing = find_sharing(
        table[:, SEGMENT - 1 :: SEGMENT], group, kv_heads, 0, order, (1, 2), tiles
    )
    sharing.items[:, 4] = SEGMENT
    most = min(sharing.tile_rows // group, max(len(table) * kv_heads // PROGRAMS, 1))
    partial = _partial_segments(table[order], sharing.tails, most)
    for row, rows, *_ in partial.tolist():
        sharing.tails[row : row + rows] += 1
    sharing.items = np.concatenate([sharing.items, partial])
    pages = -(-lengths[order] // BLOCK)
    sharing.tail_rows = _tail_rows(pages, sharing.tails * SEGMENT, min(most, MAX_TAIL_ROWS))
    return sharing


def _longest_first(table: Ints, order: Ints, lengths: Ints) -> Ints:
    """`order` with families, rows that share their first page, by the longest of each: programs start in the
    order of rows, and a long one that started last would run alone at the end."""
    family = np.cumsum(np.diff(table[order, 0], prepend=table[order[0], 0]) != 0)
    longest = np.zeros(family[-1] + 1, np.int64)
    np.maximum.at(longest, family, lengths[order])
    return order[np.lexsort((family, -longest[family]))]


def _tail_rows(pages: Ints, firsts: Ints, most: int) -> int:
    """Rows, at most `most`, whose tails one program computes in the least time.

    pages    [B] of each row
    firsts   [B] the first one of its tail

    In each segment a program takes a turn for every page that one of its rows has, for all of its rows.
    """
    turns = {1 << power: _turns(pages, firsts, 1 << power) for power in range(most.bit_length())}
    best = min(turns, key=lambda count: turns[count])
    return best if turns[best] < MIN_GAIN * turns[1] else 1


def _turns(pages: Ints, firsts: Ints, count: int) -> int:
    edges = np.arange(0, len(pages), count)
    last, first = np.maximum.reduceat(pages, edges), np.minimum.reduceat(firsts, edges)
    rows = np.diff(edges, append=len(pages))
    return PROGRAM_TURNS * len(edges) + int((rows * np.maximum(last - first, 0)).sum())


def _partial_segments(table: Ints, tails: Ints, most: int) -> Ints:
    """Items, of 2 to `most` neighbours that share pages of the first segment of their tails."""
    columns = np.minimum(tails[:, None] * SEGMENT + np.arange(SEGMENT - 1), table.shape[1] - 1)
    pages = np.take_along_axis(table, columns, axis=1)
    same = (pages[1:] == pages[:-1]) & (pages[1:] != PAD_PAGE)
    is_same = (tails[1:] == tails[:-1]) & same[:, 0]
    common = np.minimum.accumulate(same, axis=1).sum(axis=1)
    items: list[tuple[int, int, int, int, int]] = []
    edges = [0, *(np.flatnonzero(~is_same) + 1).tolist(), len(table)]
    for first, stop in pairwise(edges):
        for row in range(first, stop, max(most, 1)):
            rows, tail = min(most, stop - row), int(tails[row])
            if rows > 1:
                shared = int(common[row : row + rows - 1].min())
                items.append((row, rows, tail, tail + 1, shared))
    return np.array(items, dtype=np.int64).reshape(-1, 5)


def num_segments(length: int) -> int:
    """The number of segments of a sequence."""
    return -(-length // (SEGMENT * BLOCK))
