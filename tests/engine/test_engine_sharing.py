"""Which pages of a batch are read once, and how many pages a burst may take: bookkeeping only."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from engine_kit import prompt, tiny_decoder
from hypothesis import given
from hypothesis import strategies as st

from graft.engine.native.kv.pages import PAD_PAGE, Pages
from graft.engine.native.kv.sequences import SequenceTree
from graft.engine.native.kv.sharing import MAX_SLOTS, find_sharing
from graft.engine.native.request import SampleRequest
from graft.engine.native.scheduler import PlannedWork, Scheduler
from graft.types import Sampling

PAGE = 16


@st.composite
def forests(draw: st.DrawFn) -> np.ndarray:
    """A page table: rows go down random trees of pages, and each ends with a page of its own."""
    count = draw(st.integers(1, 24))
    rows: list[list[int]] = []
    fresh = iter(range(1, 100_000))
    for _ in range(count):
        stem: list[int] = []
        if rows and draw(st.booleans()):
            other = draw(st.sampled_from(rows))
            stem = other[
                : draw(st.integers(0, len(other) - 1))
            ]  # never its last page, which is its own
        own = draw(st.integers(1, draw(st.sampled_from([1, 3, 40]))))
        rows.append(stem + [next(fresh) for _ in range(own)])
    names = np.random.default_rng(draw(st.integers(0, 99))).permutation(next(fresh)) + 1
    table = np.full((count, max(map(len, rows))), PAD_PAGE, dtype=np.int64)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = names[np.array(row) - 1]
    return table


@given(
    forests(),
    st.sampled_from([1, 2, 3, 4, 7, 8, 16, 40]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 2, 4, 8]),
)
def test_every_page_of_a_row_is_read_once_by_a_span_or_its_tail(
    table: np.ndarray, group: int, kv_heads: int, splits: int
) -> None:
    sharing = find_sharing(table, group, kv_heads, splits)
    assert sorted(sharing.order.tolist()) == list(range(len(table)))
    table = table[sharing.order]
    held = (table != PAD_PAGE).sum(1)
    reads = np.zeros_like(table)
    slots: list[list[int]] = [[] for _ in table]
    for first, rows, start, stop, slot in sharing.items.tolist():
        assert rows >= 1 and start < stop and rows * group <= max(sharing.tile_rows, group)
        members = table[first : first + rows, start:stop]
        assert len(members) == rows  # none beyond the batch
        assert (members == members[0]).all() and (members != PAD_PAGE).all()
        reads[first : first + rows, start:stop] += 1
        for row in range(first, first + rows):
            slots[row].append(slot)
    for row, tail in enumerate(sharing.tails.tolist()):
        assert tail < held[row]  # the page it writes to is its own
        assert (reads[row, :tail] == 1).all() and (reads[row, tail:] == 0).all()
        # the kernel merges `slots[row]` slots, from `splits` on
        assert sorted(slots[row]) == list(range(splits, splits + sharing.slots[row]))
        assert sharing.slots[row] <= MAX_SLOTS


@given(forests())
def test_rows_that_share_enough_are_not_read_one_by_one(table: np.ndarray) -> None:
    """Where all rows have two pages or more in common, no tail begins before them."""
    common = int((table == table[0]).all(0).cumprod().sum())
    if len(table) > 2 and common >= 2:
        assert find_sharing(table, 2, 8, 1).tails.min() >= min(common, 2)


def pool_of(num_pages: int) -> SequenceTree:
    shape = tiny_decoder().shape
    return SequenceTree(Pages(shape, num_pages, PAGE, torch.device("cpu"), torch.float32))


def drawing(tree: SequenceTree, length: int, budget: int) -> PlannedWork:
    """A sequence that lacks only its last token."""
    sequence = tree.open(prompt(length))
    assert tree.reserve(sequence, length)
    sequence.cached = length - 1
    sampling = Sampling(max_tokens=budget)
    loop = asyncio.new_event_loop()
    request = SampleRequest(
        sequence, 0, sampling, frozenset(), None, None, 0, budget, 0, loop.create_future()
    )
    loop.close()
    return PlannedWork(sequence, 1, request)


def scheduler_of(tree: SequenceTree, works: list[PlannedWork]) -> Scheduler:
    scheduler = Scheduler(tree, prefill_chunk=64, max_running=64, separate_prefill=True)
    scheduler.running = [work.request for work in works if work.request is not None]
    return scheduler


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 90)), min_size=1, max_size=6),
    st.integers(0, 12),
    st.integers(1, 128),
)
def test_a_burst_is_as_long_as_the_pool_allows(
    rows: list[tuple[int, int]], spare: int, max_steps: int
) -> None:
    tree = pool_of(sum(-(-length // PAGE) for length, _ in rows) + spare)
    works = [drawing(tree, length, budget) for length, budget in rows]
    before = [list(work.sequence.pages) for work in works]
    steps = scheduler_of(tree, works).reserve_ahead(works, max_steps)
    held = [page for work in works for page in work.sequence.pages]
    assert 1 <= steps <= min(max_steps, max(budget for _, budget in rows))
    assert len(set(held)) == len(held) and len(held) + tree.pages.free == tree.pages.total
    for work, pages, (length, budget) in zip(works, before, rows, strict=True):
        end = length - 1 + min(steps, budget)
        assert work.sequence.pages[: len(pages)] == pages
        assert len(work.sequence.pages) == max(len(pages), -(-end // PAGE))  # and not one more
        assert steps == 1 or work.sequence.writable >= end
    if steps == 1:
        assert [work.sequence.pages for work in works] == before


def test_idle_contexts_are_evicted_for_a_longer_burst() -> None:
    tree = pool_of(3)
    works = [drawing(tree, 10, 30)]
    idle = tree.open(prompt(20))
    assert tree.reserve(idle, 20)
    idle.cached = 20
    scheduler = scheduler_of(tree, works)
    assert scheduler.reserve_ahead(works, 30) == 30  # 39 positions: three pages
    assert idle.pages == [] and scheduler.evictions == 1
    assert scheduler.reserve_ahead([], 8) == 1


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.lists(st.integers(1, 90), min_size=1, max_size=6),
    st.integers(0, 40),
)
def test_what_is_planned_ahead_takes_free_pages_only(
    running: list[int], waiting: list[int], spare: int
) -> None:
    tree = pool_of(sum(-(-length // PAGE) for length in running) + spare)
    works = [drawing(tree, length, 8) for length in running]
    before = [list(work.sequence.pages) for work in works]
    scheduler = scheduler_of(tree, works)
    for length in waiting:
        request = drawing(pool_of(8), length, 8).request
        assert request is not None
        request.sequence = tree.open(prompt(length))
        scheduler.add(request)
    ahead = scheduler.plan_ahead()
    assert [work.sequence.pages for work in works] == before
    assert tree.pages.free >= min(spare, len(running))  # one each to grow
    assert sum(work.count for work in ahead) <= scheduler.prefill_chunk
    lengths = [len(work.sequence.tokens) for work in ahead]
    for work, length in zip(ahead, lengths, strict=True):
        assert work.request is None and 0 < work.count <= length - 1  # the last one draws
        assert work.sequence.writable >= work.count
    admitted = [len(r.sequence.tokens) for r in scheduler.running[len(running) :]]
    assert admitted == waiting[: len(admitted)]  # in the order of arrival
    assert lengths == [length for length in admitted if length > 1][: len(lengths)]
    if sum(waiting) <= 64 and spare >= sum(-(-n // PAGE) + 1 for n in waiting) + len(running):
        assert len(admitted) == len(waiting)


def test_siblings_that_wait_for_one_stem_plan_it_ahead_once() -> None:
    tree = pool_of(20)
    root = tree.open(prompt(30))
    scheduler = scheduler_of(tree, [])
    for sequence in (root, tree.fork(root)):
        request = drawing(pool_of(4), 8, 8).request
        assert request is not None
        request.sequence = sequence
        scheduler.add(request)
    (work,) = scheduler.plan_ahead()
    assert work.sequence is root.stem and work.count == 29
    assert len(scheduler.running) == 2 and not scheduler.waiting
    assert scheduler.plan_ahead() == []


@pytest.mark.parametrize(("max_steps", "got"), [(6, 6), (7, 3), (64, 4)])
def test_a_burst_is_halved_until_it_fits(max_steps: int, got: int) -> None:
    tree = pool_of(2)
    works = [drawing(tree, 11, 64), drawing(tree, 5, 64)]  # positions 10 and 4 are next
    assert scheduler_of(tree, works).reserve_ahead(works, max_steps) == got
    assert tree.pages.free == 0
