"""Who learns from which rows: every row once, equal work, and nothing new for a process alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graft.models.tree.packing import split_rows
from graft.rollout.batching import trajectories_of
from graft.train.micro_batches import _pieces, _size, share_out
from graft.types import Trajectory
from tests.trees import group, random_tree

forests = st.lists(st.integers(0, 10_000), min_size=1, max_size=9).map(
    lambda seeds: trajectories_of([random_tree(seed) for seed in seeds])
)
budgets = st.integers(1, 90)


def flat(share: list[list[int]]) -> list[int]:
    return [number for part in share for number in part]


def trees(*sizes: int) -> list[Trajectory]:
    """A tree of one row for each size."""
    return trajectories_of([group([1], [[2] * (size - 1)], [0.0]) for size in sizes])


@given(forests, budgets, st.integers(1, 5))
def test_each_row_is_in_exactly_one_share(rows, budget, ways):
    shares = share_out(rows, budget, ways)
    assert len(shares) == ways
    assert sorted(number for share in shares for number in flat(share)) == list(range(len(rows)))
    assert all(part for share in shares for part in share)


@given(forests, budgets, st.integers(2, 5))
def test_no_way_has_more_than_the_lightest_and_one_piece(rows, budget, ways):
    pieces = {tuple(numbers): size for size, numbers in _pieces(rows, ways)}
    loads = []
    for share in share_out(rows, budget, ways):
        own = set(flat(share))
        inside = [size for numbers, size in pieces.items() if own.issuperset(numbers)]
        assert sum(len(numbers) for numbers in pieces if own.issuperset(numbers)) == len(own)
        # pieces of one tree that come together again have their prefix once
        assert _size(rows, sorted(own)) <= sum(inside)
        loads.append(sum(inside))
    assert max(loads) <= min(loads) + max(pieces.values())


@given(forests, budgets)
def test_one_way_is_what_a_process_alone_does(rows, budget):
    assert share_out(rows, budget, 1) == [split_rows(rows, budget)]


@given(forests, budgets, st.integers(2, 5))
def test_a_micro_batch_holds_no_more_than_the_budget_unless_it_is_one_row(rows, budget, ways):
    for share in share_out(rows, budget, ways):
        for part in share:
            assert len(part) == 1 or _size(rows, part) <= budget


@given(forests, budgets, st.integers(2, 5))
def test_every_process_works_out_the_same(rows, budget, ways):
    assert share_out(rows, budget, ways) == share_out(list(rows), budget, ways)


def test_trees_go_to_the_process_with_the_fewest_tokens():
    # 90 | 50 40, and the last 20 to the lighter of two 90s, the first
    assert share_out(trees(90, 50, 40, 20), 1000, 2) == [[[0, 3]], [[1, 2]]]
    assert share_out(trees(20, 40, 50, 90), 100, 2) == [[[0], [3]], [[1, 2]]]


def test_a_tree_larger_than_a_share_is_cut_between_its_rows():
    rows = trajectories_of([group([1] * 10, [[2] * 75, [3] * 75], [0.0, 1.0])])
    assert _size(rows, [0, 1]) == 160
    assert share_out(rows, 1000, 2) == [[[0]], [[1]]]


def test_fewer_rows_than_ways_leave_some_with_nothing():
    assert share_out(trees(7), 1000, 3) == [[[0]], [], []]
    assert share_out([], 1000, 2) == [[], []]
