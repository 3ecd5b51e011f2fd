"""Episodes as tensors: one row per trajectory, one column per token behind the prompt."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from hashlib import blake2b
from itertools import chain, repeat

import numpy as np
import torch

from graft.algos.batch import Batch
from graft.models.tree.packing import ranges, response
from graft.rewards.weighted import METRIC
from graft.types import Author, Episode, Span, Status, Trajectory

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
    """The `[N, T]` grid of these trajectories, which stay with it.

    prompt "2+3=", policy "[2+3]", env "5;", policy "5" and end of text (8 columns):
        mask     1 1 1 1 1 . . 1 1        turns    0 0 0 0 0 - - 1 1
        rewards  0 0 0 0 0 . . 0 1        (the turn's reward, on its last token)

    A span that is in several contexts of one attempt is trained in the first of them only.
    """
    columns = [response(row) for row in trajectories]
    width = max((sum(len(span.tokens) for span in spans) for spans in columns), default=0)
    numbers: dict[int, int] = {}  # span -> its number in the batch, the same in every row
    groups: dict[tuple[int, str], int] = {}  # attempts at one task, from one seat
    leaves: dict[tuple[int, int], int] = {}
    group_of_row: list[int] = []
    leaf_of_row: list[int] = []
    last_turn: dict[int, int] = {}
    seen: set[tuple[int, int]] = set()  # the spans of each leaf
    placed: list[tuple[int, int, int, bool]] = []  # first cell, length, number, is observed
    acts: list[tuple[int, int, int, int, int]] = []  # first cell, length, turn, state, version
    chosen: list[Span] = []  # the spans of `acts`
    for n, (row, spans) in enumerate(zip(trajectories, columns, strict=True)):
        group_of_row.append(groups.setdefault((id(row.episode), row.leaf.seat), len(groups)))
        leaf = leaves.setdefault((id(row.episode), row.leaf_index), len(leaves))
        leaf_of_row.append(leaf)
        cell, turn, previous = n * width, last_turn.get(leaf, -1), None
        for span in spans:
            length, number = len(span.tokens), numbers.setdefault(id(span), len(numbers))
            is_new = (leaf, number) not in seen
            seen.add((leaf, number))
            placed.append((cell, length, number, is_new and span.author is Author.ENV))
            if span.author is Author.POLICY and length and is_new:
                turn += previous is not Author.POLICY  # a split span is still one turn
                state = int(span.info["state"], 16) >> 1 if "state" in span.info else PAD
                acts.append((cell, length, turn, state, span.version))
                chosen.append(span)
            cell, previous = cell + length, span.author
        last_turn[leaf] = turn  # the next context of this leaf continues the count
    # each grid is filled at once: for a short span numpy takes longer to begin than to write it
    grid = partial(_grid, (len(trajectories), width))
    cells, lengths, number, observed = np.array(placed, np.int64).reshape(-1, 4).T
    where = ranges(cells, lengths)
    tensors = {
        "spans": grid(PAD, where, np.repeat(number, lengths)),
        "observed": grid(False, where, np.repeat(observed.astype(bool), lengths)),
    }
    cells, lengths, turn, state, version = np.array(acts, np.int64).reshape(-1, 5).T
    where = ranges(cells, lengths)
    # a recorded row has no log-probs
    logprobs = [span.logprobs or repeat(math.nan, len(span.tokens)) for span in chosen]
    entropies = [span.entropies or repeat(0.0, len(span.tokens)) for span in chosen]
    tensors |= {
        "turns": grid(PAD, where, np.repeat(turn, lengths)),
        "states": grid(PAD, where, np.repeat(state, lengths)),
        "versions": grid(0, where, np.repeat(version, lengths)),
        "mask": grid(False, where, _joined([span.mask for span in chosen], where, np.bool_)),
        "actions": grid(0, where, _joined([span.actions for span in chosen], where, np.int64)),
        "modes": grid(0, where, _joined([span.modes for span in chosen], where, np.int64)),
        "logprobs": grid(0, where, _joined(logprobs, where, np.float32)),
        "entropies": grid(0, where, _joined(entropies, where, np.float32)),
        "rewards": grid(
            0, cells + lengths - 1, np.array([span.reward for span in chosen], np.float32)
        ),
    }
    outcomes = [row.leaf for row in trajectories]
    factual = [
        math.nan if leaf.twin is None else row.episode.leaves[leaf.twin].reward
        for row, leaf in zip(trajectories, outcomes, strict=True)
    ]
    names = [
        f"{row.task.env}/{leaf.seat}" for row, leaf in zip(trajectories, outcomes, strict=True)
    ]
    roles = {name: stable_number(name) for name in dict.fromkeys(names)}
    return Batch(
        **tensors,
        trajectories=trajectories,
        reward=torch.tensor([leaf.reward for leaf in outcomes], dtype=torch.float32),
        group=torch.tensor(group_of_row, dtype=torch.long),
        leaf=torch.tensor(leaf_of_row, dtype=torch.long),
        truncated=torch.tensor([leaf.status == "truncated" for leaf in outcomes], dtype=torch.bool),
        twin_reward=torch.tensor(factual, dtype=torch.float32),
        greedy_reward=_greedy_rewards(trajectories),
        role=torch.tensor([roles[name] for name in names], dtype=torch.long),
        **_parts(trajectories),
    )


def _grid(
    shape: tuple[int, int], empty: float, where: np.ndarray, values: np.ndarray
) -> torch.Tensor:
    """A grid with `values` in the cells `where`, counted row by row, and `empty` in all others."""
    grid = np.full(shape, empty, values.dtype)
    grid.reshape(-1)[where] = values
    return torch.from_numpy(grid)


def _joined(
    lists: Iterable[Iterable[float]], where: np.ndarray, kind: type[np.generic]
) -> np.ndarray:
    return np.fromiter(chain.from_iterable(lists), kind, len(where))


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
