"""What comes before a token on its path, for layers that carry a state: the learner's form.

    12 -> abc, de, chunks of two        path of abc   12 ab c        chunk   12      ab     c      de
                                        path of de    12 de          parent  none    12     ab     12

The engine's form is `engine.native.cpu.recurrence`. Both are asked the same two things: the rows of the
tokens before each one, for a convolution, and the result of a recurrence. A layer knows nothing else of
trees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from graft.models.layers.chunks import ScanInputs, scan_chunks
from graft.models.ops import gather_rows
from graft.models.recurrence import CHUNK
from graft.models.tree.packing import TokenRun
from graft.models.tree.path_blocks import last_tokens


class Paths(Protocol):
    """The paths of the T tokens of a forward pass."""

    count: int
    """T, without rows that only pad."""

    def before(self, layer: int, x: Tensor, count: int) -> Tensor:
        """[T, count, ...] the x [T, ...] of the `count` tokens before each one, oldest first; else 0."""
        ...

    def scan(self, layer: int, new: ScanInputs, in_order: bool) -> Tensor:
        """[T, H, dv] what each token reads of its state."""
        ...


def paths_of(attend: Callable[..., Any], count: int) -> Paths:
    """The paths along which `attend` looks back; of a plain function: `count` tokens of one sequence."""
    inside: Any = getattr(attend, "inside", attend)
    if getattr(inside, "paths", None) is not None:
        return inside.paths
    if getattr(inside, "runs", None) is None:
        return TreePaths([TokenRun(0, count, [])])
    inside.paths = TreePaths(inside.runs)
    return inside.paths


@dataclass(slots=True)
class TreeLevel:
    """Chunks of the same number, counted from the beginning of their paths."""

    index: Tensor
    """[n, C] tokens of the forest; their number where a path has ended. No column is of ended paths alone."""
    parents: Tensor
    """[n] the chunk of the level before that each follows."""


class TreePaths:
    """The chunks of a packed forest; what paths share of a chunk at a fork is computed in each of them."""

    def __init__(self, runs: list[TokenRun]) -> None:
        """`runs` come after the runs that their paths begin with, as `packing` writes them."""
        self.runs = runs
        self.count = max((run.stop for run in runs), default=0)
        index: list[list[np.ndarray]] = []
        parents: list[list[int]] = []
        chunks_of: dict[int, list[int]] = {}  # by the first token of a run: its chunk of each level
        place = np.zeros((self.count, 2), dtype=np.int64)  # level, and row of its chunks
        for run in runs:
            path = [part for part in run.path if part[0] < part[1]]
            whole, odd = divmod(run.depth, CHUNK)
            tokens = np.concatenate([last_tokens(path, odd), np.arange(run.start, run.stop)])
            chunks = chunks_of[path[-1][0]][:whole] if whole else []
            for first in range(0, len(tokens), CHUNK):
                level, part = len(chunks), tokens[first : first + CHUNK]
                if level == len(index):
                    index.append([])
                    parents.append([])
                at = len(index[level])
                index[level].append(
                    np.pad(part, (0, CHUNK - len(part)), constant_values=self.count)
                )
                parents[level].append(chunks[-1] if chunks else 0)
                new = np.arange(len(part))[part >= run.start]
                place[part[new]] = np.stack([np.full(len(new), level), at * CHUNK + new], 1)
                chunks = [*chunks, at]
            chunks_of[run.start] = chunks
        self.levels = [
            TreeLevel(torch.from_numpy(_trimmed(np.stack(rows), self.count)), torch.tensor(before))
            for rows, before in zip(index, parents, strict=True)
        ]
        widths = np.array([level.index.shape[1] for level in self.levels] or [0])
        sizes = np.array([0, *(level.index.numel() for level in self.levels)]).cumsum()
        level, chunk, row = place[:, 0], place[:, 1] // CHUNK, place[:, 1] % CHUNK
        self.inverse = torch.from_numpy(sizes[level] + chunk * widths[level] + row)
        self._earlier: dict[int, Tensor] = {}

    def before(self, layer: int, x: Tensor, count: int) -> Tensor:
        """The rows of the tokens before each; see `Paths`."""
        del layer
        if count not in self._earlier:
            self._earlier[count] = self._find_earlier(count)
        index = self._earlier[count] = self._earlier[count].to(x.device)
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return gather_rows(padded, index.flatten()).view(*index.shape, *x.shape[1:])

    def _find_earlier(self, count: int) -> Tensor:
        """[T, count] the tokens before each, oldest first; T where there is none."""
        earlier = np.full((self.count, count), self.count, dtype=np.int64)
        for run in self.runs:
            head = last_tokens(run.path, count)
            missing = np.full(count - len(head), self.count)
            line = np.concatenate([missing, head, np.arange(run.start, run.stop)])
            steps = np.arange(run.stop - run.start)[:, None] + np.arange(count)
            earlier[run.start : run.stop] = line[steps]
        return torch.from_numpy(earlier)

    def scan(self, layer: int, new: ScanInputs, in_order: bool) -> Tensor:
        """The recurrence along every path; see `Paths`."""
        del layer
        padded = [None if x is None else torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in new]
        heads, key_dim, device = new.v.shape[1:], new.k.shape[2], new.v.device
        states = new.v.new_zeros(1, *heads, key_dim)
        read: list[Tensor] = []
        if self.inverse.device != device:  # once, not in every layer
            self.inverse = self.inverse.to(device)
            moved = [(level.index.to(device), level.parents.to(device)) for level in self.levels]
            self.levels = [TreeLevel(*each) for each in moved]
        for level in self.levels:
            index = level.index
            inputs = [
                None if x is None else gather_rows(x, index.flatten()).unflatten(0, index.shape)
                for x in padded
            ]
            state = gather_rows(states, level.parents)
            rows, states = scan_chunks(state, ScanInputs(*inputs), in_order)  # type: ignore[arg-type]
            read.append(rows.flatten(0, 1))
        return gather_rows(torch.cat(read), self.inverse) if read else new.v


def _trimmed(index: np.ndarray, count: int) -> np.ndarray:
    """Index [n, C] without the last columns, in which all paths have ended (`count`)."""
    return index[:, : int((index < count).any(0).sum())]
