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
    assert sharing.tail_order.tolist() == [2, 1, 0]  # by where tails begin, the longest first


@pytest.mark.parametrize(
    ("heads", "pages", "firsts", "kinds"),
    [
        # with 264 heads the turns of all programs of a head count: 264 programs run at a time
        (264, [5] * 8, [4] * 8, [(8, 1)]),  # 8 programs of 1 + 1 turns: 16; one of 8 + 1: 9
        (264, [9, 9, 9, 9, 5, 5, 5, 5], [4] * 8, [(4, 1)]),  # 4 x 5 + 1 and 4 x 1 + 1: 26
        # with 8 the longest counts too, 0.8 of it: programs of 8 rows, 65 turns, would take 52
        (8, [12] * 64, [4] * 64, [(2, 1), (4, 2)]),  # 32 programs of 16 + 1 turns: 16.5
        (8, [40], [0], [(1, 16), (2, 16), (4, 16), (8, 16)]),  # a segment each: 4 + 1
    ],
)
def test_tails_share_programs_or_are_shared_so_that_all_end_soon(
    heads: int, pages: list[int], firsts: list[int], kinds: list[tuple[int, int]]
) -> None:
    rows = np.array(pages), np.array(firsts)
    assert segment_sharing._tail_programs(*rows, 8, heads, 0.0) == kinds


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
    assert all(rows * group <= sharing.tile_rows for rows, _ in sharing.tail_programs)
    assert sorted(sharing.tail_order.tolist()) == list(range(len(lengths)))
