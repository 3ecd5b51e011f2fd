"""Episodes as tensors: one row per trajectory, one column per token behind the prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from graft.algos.batch import Batch
from graft.models.tree.packing import response
from graft.types import Author, Episode, Trajectory

PAD = -1


def trajectories_of(episodes: Sequence[Episode]) -> list[Trajectory]:
    """The trajectories to train on: those that no engine, tool or environment broke, without the seats
    whose game was over before their first turn."""
    return [
        trajectory
        for episode in episodes
        for trajectory in episode.trajectories()
        if trajectory.leaf.status.is_trainable and trajectory.leaf.has_acted
    ]


def to_batch(trajectories: Sequence[Trajectory]) -> Batch:
    """The `[N, T]` grid of these trajectories.

    prompt "2+3=", policy "[2+3]", env "5;", policy "5" and end of text (8 columns):
        mask     1 1 1 1 1 . . 1 1        turns    0 0 0 0 0 - - 1 1
        rewards  0 0 0 0 0 . . 0 1        (the turn's reward, on its last token)
    """
    columns = [response(row) for row in trajectories]
    width = max((sum(map(len, spans)) for spans in columns), default=0)
    shape = (len(trajectories), width)
    ints = {name: np.full(shape, PAD, np.int64) for name in ("turns", "spans")}
    zeros = {name: np.zeros(shape, np.int64) for name in ("actions", "modes", "versions")}
    floats = {name: np.zeros(shape, np.float32) for name in ("logprobs", "entropies", "rewards")}
    mask = np.zeros(shape, bool)
    numbers: dict[int, int] = {}  # span -> its number in the batch, the same in every row
    groups: dict[tuple[int, str], int] = {}  # attempts at one task, from one seat
    leaves: dict[tuple[int, int], int] = {}
    last_turn: dict[int, int] = {}
    for n, (row, spans) in enumerate(zip(trajectories, columns, strict=True)):
        groups.setdefault((id(row.episode), row.leaf.seat), len(groups))
        leaf = leaves.setdefault((id(row.episode), row.leaf_index), len(leaves))
        start, turn, previous = 0, last_turn.get(leaf, -1), None
        for span in spans:
            cells = np.s_[n, start : start + len(span)]
            start += len(span)
            ints["spans"][cells] = numbers.setdefault(id(span), len(numbers))
            if span.author is Author.POLICY and len(span):
                turn += previous is not Author.POLICY  # a split span is still one turn
                ints["turns"][cells] = turn
                mask[cells] = span.mask
                zeros["actions"][cells] = span.actions
                zeros["modes"][cells] = span.modes
                zeros["versions"][cells] = span.version
                floats["logprobs"][cells] = span.logprobs
                floats["entropies"][cells] = span.entropies
                floats["rewards"][n, start - 1] = span.reward
            previous = span.author
        last_turn[leaf] = turn  # the next context of this leaf continues the count
    leaf_of_row = [leaves[id(row.episode), row.leaf_index] for row in trajectories]
    factual = [
        math.nan if row.leaf.twin is None else row.episode.leaves[row.leaf.twin].reward
        for row in trajectories
    ]
    tensors = {name: torch.from_numpy(x) for name, x in {**ints, **zeros, **floats}.items()}
    return Batch(
        **tensors,
        mask=torch.from_numpy(mask),
        reward=torch.tensor([row.leaf.reward for row in trajectories], dtype=torch.float32),
        group=torch.tensor(
            [groups[id(row.episode), row.leaf.seat] for row in trajectories], dtype=torch.long
        ),
        leaf=torch.tensor(leaf_of_row, dtype=torch.long),
        truncated=torch.tensor(
            [row.leaf.status == "truncated" for row in trajectories], dtype=torch.bool
        ),
        twin_reward=torch.tensor(factual, dtype=torch.float32),
    )
