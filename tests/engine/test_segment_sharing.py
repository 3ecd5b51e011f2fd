"""Which program computes which segment: each segment of a row exactly once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.engine.native.kv import segment_sharing
from graft.engine.native.kv.segment_sharing import num_segments, share_segments
from graft.models.tree.path_blocks import BLOCK, SEGMENT


def test_whole_segments_are_shared_and_parts_are_not() -> None:
    table = np.arange(1, 14)[None].repeat(3, 0)
    table[1, 9:] += 100  # shares two segments and a page
    table[2, 3:] += 200  # shares three pages
    sharing = share_segments(table, np.full(3, 13 * BLOCK), group=2, kv_heads=8)
    assert sharing.tails[np.argsort(sharing.order)].tolist() == [2, 2, 0]
    assert [item[:4].tolist() for item in sharing.items] == [[0, 2, 0, 1], [0, 2, 1, 2]]
    assert len(share_segments(table[:, :2], np.full(3, 2 * BLOCK), 2, 8).items) == 0


def test_a_segment_that_rows_only_begin_together_is_an_item(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The example of the module: rows 0 and 1 share a segment and two pages, row 2 the segment."""
    monkeypatch.setattr(segment_sharing, "PROGRAMS", 1)
    table = np.array(
        [[1, 2, 3, 4, 5, 6, 7, 8, 0], [1, 2, 3, 4, 5, 6, 9, 10, 11], [1, 2, 3, 4, 12, *[0] * 4]]
    )
    sharing = share_segments(table, np.array([8, 9, 5]) * BLOCK, group=2, kv_heads=1)
    assert sharing.order.tolist() == [0, 1, 2]
    assert sharing.items.tolist() == [[0, 3, 0, 1, 4], [0, 2, 1, 2, 2]]
    assert sharing.tails.tolist() == [2, 2, 1]


def test_families_with_the_longest_rows_come_first_and_siblings_stay_together() -> None:
    """Pages 5 to 7 are of two siblings, of which one is the longest of all."""
    table = np.array([[1, 2, 0], [5, 6, 0], [3, 4, 0], [5, 6, 7]])
    sharing = share_segments(table, np.array([100, 70, 128, 140]), group=2, kv_heads=8)
    assert sharing.order.tolist() == [1, 3, 2, 0]


@pytest.mark.parametrize(
    ("pages", "firsts", "best"),
    [
        ([5] * 8, [4] * 8, 8),  # 8 programs of 1 turn: 24; one of 8 turns: 10
        ([40] * 8, [4] * 8, 1),  # 304 and 290: less than a tenth
        ([5, 9, 5, 9, 5, 9, 5, 9], [4] * 8, 1),  # 40; in pairs of 10 turns 48
        ([5, 5, 9, 9, 5, 5, 9, 9], [4] * 8, 2),  # 40; in pairs 32
        ([5, 5, 5, 5, 21, 21, 21, 21], [4, 4, 4, 4, 20, 20, 20, 20], 4),  # 24; in fours 12
    ],
)
def test_neighbours_with_short_tails_of_like_length_share_a_program(
    pages: list[int], firsts: list[int], best: int
) -> None:
    assert segment_sharing._tail_rows(np.array(pages), np.array(firsts), 8) == best


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Tables and lengths of rows that were forked from each other at any page."""
    rows: list[list[int]] = []
    page = 0
    for _ in range(draw(st.integers(1, 12))):
        parent = draw(st.sampled_from(rows))[:-1] if rows and draw(st.booleans()) else []
        shared = parent[: draw(st.integers(0, len(parent)))]
        own = draw(st.integers(1, 9))
        rows.append([*shared, *range(page + 1, page + own + 1)])
        page += own
    table = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for row, pages in enumerate(rows):
        table[row, : len(pages)] = pages
    lengths = [len(pages) * BLOCK - draw(st.integers(0, BLOCK - 1)) for pages in rows]
    return table, np.array(lengths)


@settings(deadline=None)
@given(batches(), st.sampled_from([1, 2, 3, 4, 7, 32]), st.sampled_from([1, 64, 4096]))
def test_every_segment_of_a_row_is_computed_once(
    batch: tuple[np.ndarray, np.ndarray], group: int, programs: int
) -> None:
    table, lengths = batch
    kept, segment_sharing.PROGRAMS = segment_sharing.PROGRAMS, programs
    try:
        sharing = share_segments(table, lengths, group, kv_heads=8)
    finally:
        segment_sharing.PROGRAMS = kept
    table, lengths = table[sharing.order], lengths[sharing.order]
    done: Counter[tuple[int, int]] = Counter()
    for row, rows, start, stop, shared in sharing.items.tolist():
        assert 1 <= rows * group <= sharing.tile_rows and 1 <= shared <= SEGMENT
        for segment in range(start, stop):
            first = segment * SEGMENT
            pages = table[row : row + rows, first : first + shared]
            assert pages.shape[1] == shared and (pages == pages[0]).all() and pages.all()
            done.update((row + i, segment) for i in range(rows))
    for row, (length, tail) in enumerate(
        zip(lengths.tolist(), sharing.tails.tolist(), strict=True)
    ):
        done.update((row, segment) for segment in range(tail, num_segments(length)))
    assert done == Counter(
        (row, segment)
        for row, length in enumerate(lengths.tolist())
        for segment in range(num_segments(length))
    )
    assert sharing.tail_rows * group <= sharing.tile_rows
