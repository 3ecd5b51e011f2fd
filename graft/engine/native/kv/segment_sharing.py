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
from graft.engine.native.kv.sharing import (
    BUSY,
    Ints,
    PageSharing,
    find_sharing,
    siblings_first,
)
from graft.models.tree.path_blocks import BLOCK, SEGMENT

PROGRAMS = 128
"""About as many as an H200 has multiprocessors (132): items have fewer rows where there would be less."""
MAX_TAIL_ROWS, MAX_SPLITS = 8, 16
PROGRAM_TURNS, IDLE_TURNS = 1.0, 0.5
"""What a program takes beside its turns, and one that has no segment, in turns: those of the longest program
pass faster than the others' (LONGEST_SHARE). With these the model below chose, at 8 snapshots of an agent's
load on an H200, programs that took 0 to 3% longer than the fastest of 13 kinds."""
LONGEST_SHARE = 0.8
NEARLY = 1.04
"""Kinds of programs that take so many times as long as the best are as good: each is a graph of its own."""


def share_segments(table: Ints, lengths: Ints, group: int, kv_heads: int) -> PageSharing:
    """`find_sharing` of whole segments, and of those that siblings begin together: tails and items count
    segments instead of pages. `lengths` [B] are those of the rows at the beginning of a burst."""
    padding = -table.shape[1] % SEGMENT
    table = np.pad(table, ((0, 0), (0, padding)), constant_values=PAD_PAGE)
    order = siblings_first(table)
    # who shares the last page of a segment shares all of it
    sharing = find_sharing(table[:, SEGMENT - 1 :: SEGMENT], group, kv_heads, 0, order, (1, 2))
    sharing.items[:, 4] = SEGMENT
    most = min(sharing.tile_rows // group, max(len(table) * kv_heads // PROGRAMS, 1))
    begun = _begun(table[order], sharing.tails, most)
    for row, rows, *_ in begun.tolist():
        sharing.tails[row : row + rows] += 1
    sharing.items = np.concatenate([sharing.items, begun])
    pages, firsts = -(-lengths[order] // BLOCK), sharing.tails * SEGMENT
    # the longest first, and as long ones together: a program takes as long as its longest for all of them
    sharing.tail_order = by_tail = np.lexsort((-pages, firsts))
    most = min(sharing.tile_rows // group, MAX_TAIL_ROWS)
    of_items = SEGMENT * int((sharing.items[:, 3] - sharing.items[:, 2]).sum())
    of_items += PROGRAM_TURNS * len(sharing.items)
    tails = pages[by_tail], firsts[by_tail]
    sharing.tail_programs = _tail_programs(*tails, most, kv_heads, of_items)
    return sharing


def _tail_programs(
    pages: Ints, firsts: Ints, most: int, kv_heads: int, of_items: float
) -> list[tuple[int, int]]:
    """Rows of a program, at most `most`, and programs that share their tails: what is fastest, then what
    takes about as long.

    pages      [B] of each row
    firsts     [B] the first one of its tail
    of_items   turns of all items
    """
    segments = -(-int((pages - firsts).max()) // SEGMENT)
    kinds = [
        (rows, splits)
        for rows in _powers(most)
        for splits in _powers(min(2 * segments - 1, MAX_SPLITS))
    ]
    costs = {kind: _cost(pages, firsts, *kind, kv_heads, of_items) for kind in kinds}
    best = min(costs.values())
    return sorted((k for k in kinds if costs[k] <= NEARLY * best), key=lambda k: costs[k])


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << power for power in range(max(most, 1).bit_length())]


def _cost(
    pages: Ints, firsts: Ints, count: int, splits: int, kv_heads: int, of_items: float
) -> float:
    """Turns, one after the other, until all programs have ended: each takes one for every page that any of
    its rows has, for all of its rows; BUSY programs run at a time, the longest begin first."""
    edges = np.arange(0, len(pages), count)
    last, first = np.maximum.reduceat(pages, edges), np.minimum.reduceat(firsts, edges)
    rows, length = np.diff(edges, append=len(pages)), np.maximum(last - first, 0)
    segments = -(-length // SEGMENT)
    busy = np.minimum(segments, splits)
    turns = (rows * length + PROGRAM_TURNS * busy + IDLE_TURNS * (splits - busy)).sum() + of_items
    longest = rows * np.minimum(-(-segments // splits) * SEGMENT, length) + PROGRAM_TURNS
    return max(float(turns) * kv_heads / BUSY, LONGEST_SHARE * float(longest.max()))


def _begun(table: Ints, tails: Ints, most: int) -> Ints:
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
    """Of a sequence."""
    return -(-length // (SEGMENT * BLOCK))
