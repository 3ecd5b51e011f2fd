"""Episodes as tensors: one row per trajectory, one column per token behind the prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch

from graft.algos.batch import Batch
from graft.models.tree.packing import response
from graft.rewards.weighted import METRIC
from graft.types import Author, Episode, Status, Trajectory

PAD = -1


def trajectories_of(episodes: Sequence[Episode]) -> list[Trajectory]:
    """The trajectories to train on: those that no engine, tool or environment broke, without the seats
    whose game was over before their first turn, and without further contexts in which nothing is trained."""
    return [
        trajectory
        for episode in episodes
        for trajectory in episode.trajectories()
        if trajectory.leaf.status.is_trainable
        and trajectory.leaf.has_acted
        and (len(trajectory.leaf.tips) == 1 or any(any(one.mask) for one in trajectory.spans))
    ]


def to_batch(trajectories: Sequence[Trajectory]) -> Batch:
    """The `[N, T]` grid of these trajectories.

    prompt "2+3=", policy "[2+3]", env "5;", policy "5" and end of text (8 columns):
        mask     1 1 1 1 1 . . 1 1        turns    0 0 0 0 0 - - 1 1
        rewards  0 0 0 0 0 . . 0 1        (the turn's reward, on its last token)

    A span that is in several contexts of one attempt is trained in the first of them only.
    """
    columns = [response(row) for row in trajectories]
    width = max((sum(map(len, spans)) for spans in columns), default=0)
    shape = (len(trajectories), width)
    ints = {name: np.full(shape, PAD, np.int64) for name in ("turns", "spans", "states")}
    zeros = {name: np.zeros(shape, np.int64) for name in ("actions", "modes", "versions")}
    floats = {name: np.zeros(shape, np.float32) for name in ("logprobs", "entropies", "rewards")}
    mask, observed = np.zeros(shape, bool), np.zeros(shape, bool)
    numbers: dict[int, int] = {}  # span -> its number in the batch, the same in every row
    groups: dict[tuple[int, str], int] = {}  # attempts at one task, from one seat
    leaves: dict[tuple[int, int], int] = {}
    last_turn: dict[int, int] = {}
    seen: set[tuple[int, int]] = set()  # the spans of each leaf
    for n, (row, spans) in enumerate(zip(trajectories, columns, strict=True)):
        groups.setdefault((id(row.episode), row.leaf.seat), len(groups))
        leaf = leaves.setdefault((id(row.episode), row.leaf_index), len(leaves))
        start, turn, previous = 0, last_turn.get(leaf, -1), None
        for span in spans:
            cells = np.s_[n, start : start + len(span)]
            start += len(span)
            ints["spans"][cells] = numbers.setdefault(id(span), len(numbers))
            is_new = (leaf, id(span)) not in seen
            seen.add((leaf, id(span)))
            observed[cells] = span.author is Author.ENV and is_new
            if span.author is Author.POLICY and len(span) and is_new:
                turn += previous is not Author.POLICY  # a split span is still one turn
                ints["turns"][cells] = turn
                if "state" in span.info:
                    ints["states"][cells] = int(span.info["state"], 16) >> 1
                mask[cells] = span.mask
                zeros["actions"][cells] = span.actions
                zeros["modes"][cells] = span.modes
                zeros["versions"][cells] = span.version
                floats["logprobs"][cells] = span.logprobs or math.nan  # a recorded row has none
                floats["entropies"][cells] = span.entropies or 0.0
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
        observed=torch.from_numpy(observed),
        reward=torch.tensor([row.leaf.reward for row in trajectories], dtype=torch.float32),
        group=torch.tensor(
            [groups[id(row.episode), row.leaf.seat] for row in trajectories], dtype=torch.long
        ),
        leaf=torch.tensor(leaf_of_row, dtype=torch.long),
        truncated=torch.tensor(
            [row.leaf.status == "truncated" for row in trajectories], dtype=torch.bool
        ),
        twin_reward=torch.tensor(factual, dtype=torch.float32),
        greedy_reward=_greedy_rewards(trajectories),
        role=torch.tensor(
            [stable_number(f"{row.task.env}/{row.leaf.seat}") for row in trajectories],
            dtype=torch.long,
        ),
        **_parts(trajectories),
    )


def stable_number(name: str) -> int:
    """63 bits that are the same for the same name in every process; Python's own hash is not."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) >> 1


def _greedy_rewards(trajectories: Sequence[Trajectory]) -> torch.Tensor | None:
    """[N] of the greedy attempt at each row's task; None where there is none in the batch."""
    found = {
        id(episode): leaf.reward
        for episode in {id(row.episode): row.episode for row in trajectories}.values()
        for leaf in episode.leaves
        if leaf.status is Status.BASELINE
    }
    if not found:
        return None
    return torch.tensor([found.get(id(row.episode), math.nan) for row in trajectories])


def _parts(trajectories: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    """Values and weights of the rewards that are summed up, one column for each name."""
    names = sorted({name for row in trajectories for name in row.leaf.weights})
    if not names:
        return {}
    leaves = [row.leaf for row in trajectories]
    values = [[x.metrics.get(METRIC + n, math.nan) for n in names] for x in leaves]
    weights = [[x.weights.get(n, 0.0) for n in names] for x in leaves]
    return {"part_rewards": torch.tensor(values), "part_weights": torch.tensor(weights)}
