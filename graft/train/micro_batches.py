"""Who learns from which rows: shares of equal work, cut into micro-batches.

Every process knows the whole batch and works out all shares by itself, so nobody has to be told.

    trees of 90, 50, 40 and 20 tokens, two ways     90 | 50 40     then 20 to the lighter: 110 | 90
    one tree of 160 tokens, two ways                cut between its rows: 80 | 80 (and the prefix twice)

Which share a row falls into changes neither loss nor gradient: weights are those of the whole batch,
and gradients are added up.
"""

from __future__ import annotations

from collections.abc import Sequence

from graft.models.tree.packing import split_rows
from graft.types import Trajectory


def share_out(rows: Sequence[Trajectory], budget: int, ways: int) -> list[list[list[int]]]:
    """Of each of so many ways: its micro-batches of at most `budget` unique tokens, as row numbers."""
    if ways == 1:
        return [split_rows(rows, budget)]
    shares: list[list[int]] = [[] for _ in range(ways)]
    loads = [0] * ways
    for size, numbers in sorted(_pieces(rows, ways), key=lambda piece: (-piece[0], piece[1])):
        lightest = loads.index(min(loads))
        shares[lightest] += numbers
        loads[lightest] += size
    return [_micro_batches(rows, sorted(share), budget) for share in shares]


def _pieces(rows: Sequence[Trajectory], ways: int) -> list[tuple[int, list[int]]]:
    """Trees, and parts of trees that are more than one share: unique tokens and row numbers."""
    trees: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        trees.setdefault(id(row.episode), []).append(number)
    total = sum(_size(rows, numbers) for numbers in trees.values())
    share = max(total // ways, 1)
    return [
        (_size(rows, piece), piece)
        for numbers in trees.values()
        for piece in _micro_batches(rows, numbers, share)
    ]


def _size(rows: Sequence[Trajectory], numbers: Sequence[int]) -> int:
    return sum({id(span): len(span) for number in numbers for span in rows[number].spans}.values())


def _micro_batches(
    rows: Sequence[Trajectory], numbers: Sequence[int], budget: int
) -> list[list[int]]:
    parts = split_rows([rows[number] for number in numbers], budget)
    return [[numbers[i] for i in part] for part in parts]
