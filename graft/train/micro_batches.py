"""Which rows an optimizer step learns from, and which process from which of them: shares of equal work, cut
into micro-batches.

Every process has the whole batch and computes all shares, so none has to be sent.

    trees of 90, 50, 40 and 20 tokens, two ways     90 | 50 40     then 20 to the lighter: 110 | 90
    one tree of 160 tokens, two ways                cut between its rows: 80 | 80 (and the prefix twice)

The share of a row changes neither loss nor gradient: weights are those of the whole batch, and
gradients are added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.models.tree.packing import split_rows
from graft.types import Trajectory


def mini_batches(batch: Batch, epochs: int, count: int, seed: int) -> Iterator[Tensor]:
    """Row numbers of each optimizer step, ascending; whole groups, shuffled where there are several."""
    if count == 1:
        for _ in range(epochs):
            yield torch.arange(batch.num_rows)
        return
    groups = batch.group.unique()
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(seed + epoch)
        shuffled = groups[torch.randperm(len(groups), generator=generator)]
        for part in shuffled.tensor_split(count):
            index = torch.isin(batch.group, part).nonzero()[:, 0]
            if len(index):
                yield index


def share_out(trajectories: Sequence[Trajectory], budget: int, ways: int) -> list[list[list[int]]]:
    """The micro-batches of each of `ways` shares, of at most `budget` unique tokens, as row numbers."""
    if ways == 1:
        return [split_rows(trajectories, budget)]
    shares: list[list[int]] = [[] for _ in range(ways)]
    loads = [0] * ways
    for size, numbers in sorted(
        _pieces(trajectories, ways), key=lambda piece: (-piece[0], piece[1])
    ):
        lightest = loads.index(min(loads))
        shares[lightest] += numbers
        loads[lightest] += size
    return [_micro_batches(trajectories, sorted(share), budget) for share in shares]


def _pieces(trajectories: Sequence[Trajectory], ways: int) -> list[tuple[int, list[int]]]:
    """Trees, and parts of trees larger than one share: unique tokens and row numbers."""
    trees: dict[int, list[int]] = {}
    for number, row in enumerate(trajectories):
        trees.setdefault(id(row.episode), []).append(number)
    total = sum(_size(trajectories, numbers) for numbers in trees.values())
    share = max(total // ways, 1)
    return [
        (_size(trajectories, piece), piece)
        for numbers in trees.values()
        for piece in _micro_batches(trajectories, numbers, share)
    ]


def _size(trajectories: Sequence[Trajectory], numbers: Sequence[int]) -> int:
    return sum(
        {id(span): len(span) for number in numbers for span in trajectories[number].spans}.values()
    )


def _micro_batches(
    trajectories: Sequence[Trajectory], numbers: Sequence[int], budget: int
) -> list[list[int]]:
    parts = split_rows([trajectories[number] for number in numbers], budget)
    return [[numbers[i] for i in part] for part in parts]
