"""Lay trajectories out as a forest in which every shared token stands once.

    N rows (trajectories), T columns, L unique tokens of the forest

    two samples of one prompt              rows     0 1 2 3 4 5 6
        "12" -> "abc"                      tokens   1 2 a b c d e
             -> "de"                       ends     7 7 5 5 5 7 7

Spans are written depth first, so the subtree of a span is one interval and the whole question of who
sees whom is `(key <= query) & (query < end[key])`: d (row 5) sees 1 and 2 (their end is 7), and not a,
b, c (their end is 5). `source` maps the grid of leaves back: row 1 of it reads [5, 6].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from graft.types import Author, Span, Trajectory


@dataclass(slots=True)
class Run:
    """Tokens [start, stop) of the forest that follow each other without a fork."""

    start: int
    stop: int
    path: list[tuple[int, int]]
    """Intervals of the tokens before it on its path, root first."""

    @property
    def depth(self) -> int:
        return sum(stop - start for start, stop in self.path)


@dataclass(slots=True)
class Packed:
    """A forest of L unique tokens, and where each cell of the leaf grid finds its token."""

    tokens: Tensor  # [L]
    positions: Tensor  # [L] distance from the root: what rotary positions need
    parents: Tensor  # [L] the token before it on its path; -1 at a root
    ends: Tensor  # [L] first row behind the subtree of its span
    actions: Tensor  # [L] label of each token, what the log-prob is of
    modes: Tensor  # [L] what was allowed there
    source: Tensor  # [N, T] row of the forest, or L for padding
    runs: list[Run]

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device) -> Packed:
        names = ("tokens", "positions", "parents", "ends", "actions", "modes", "source")
        moved = {name: getattr(self, name).to(device) for name in names}
        return Packed(**moved, runs=self.runs)


def response(trajectory: Trajectory) -> list[Span]:
    """The spans behind the prompt: the columns of a row."""
    first = next((i for i, s in enumerate(trajectory.spans) if s.author is not Author.TASK), None)
    return [] if first is None else trajectory.spans[first:]


def pack(rows: Sequence[Trajectory], width: int | None = None) -> Packed:
    """One forest for these rows; `width` is T.

    Rows share a span when it is the same object, that is, when they come from one Episode.
    """
    children: dict[int, list[int]] = {}
    spans: dict[int, Span] = {}
    roots: list[int] = []
    paths: list[list[int]] = []
    for row in rows:
        names = [id(span) for span in row.spans]
        paths.append(names)
        siblings = roots
        for name, span in zip(names, row.spans, strict=True):
            if name not in spans:
                spans[name] = span
                children[name] = []
                siblings.append(name)
            siblings = children[name]
    forest = _lay_out(roots, children, spans)
    first = dict(forest.starts)
    total = len(forest.tokens)
    columns = [
        [
            first[name] + i
            for name in names[len(names) - len(response(row)) :]
            for i in range(len(spans[name]))
        ]
        for names, row in zip(paths, rows, strict=True)
    ]
    width = max((len(c) for c in columns), default=0) if width is None else width
    source = np.full((len(rows), width), total, dtype=np.int64)
    for number, column in enumerate(columns):
        source[number, : len(column)] = column
    return Packed(
        tokens=torch.tensor(forest.tokens, dtype=torch.long),
        positions=torch.tensor(forest.positions, dtype=torch.long),
        parents=torch.tensor(forest.parents, dtype=torch.long),
        ends=torch.tensor(forest.ends, dtype=torch.long),
        actions=torch.tensor(forest.actions, dtype=torch.long),
        modes=torch.tensor(forest.modes, dtype=torch.long),
        source=torch.from_numpy(source),
        runs=forest.runs,
    )


class _Forest:
    """The growing lists of `pack`."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.parents: list[int] = []
        self.ends: list[int] = []
        self.actions: list[int] = []
        self.modes: list[int] = []
        self.starts: list[tuple[int, int]] = []
        self.runs: list[Run] = []

    def write(self, name: int, span: Span, parent: int) -> None:
        start, count = len(self.tokens), len(span)
        depth = self.positions[parent] + 1 if parent >= 0 else 0
        self.starts.append((name, start))
        self.tokens += span.tokens
        self.positions += range(depth, depth + count)
        self.parents += [parent, *range(start, start + count - 1)][:count]
        self.actions += span.actions or span.tokens
        self.modes += span.modes or [0] * count
        self.ends += [0] * count  # known when the subtree is written


def _lay_out(roots: list[int], children: dict[int, list[int]], spans: dict[int, Span]) -> _Forest:
    forest = _Forest()
    opened: dict[int, int] = {}  # span -> its first row, while its subtree is being written
    # (span, row of the token before it, the run above it, whether it merely goes on with that run)
    todo: list[tuple[int, int, Run | None, bool]] = [
        (name, -1, None, False) for name in roots[::-1]
    ]
    while todo:
        name, parent, above, goes_on = todo.pop()
        span = spans[name]
        if name in opened:  # second visit: everything below it is written
            start = opened.pop(name)
            forest.ends[start : start + len(span)] = [len(forest.tokens)] * len(span)
            continue
        start = opened[name] = len(forest.tokens)
        forest.write(name, span, parent)
        if above is not None and goes_on:
            run = above
        else:
            run = Run(
                start, start, [] if above is None else [*above.path, (above.start, above.stop)]
            )
            forest.runs.append(run)
        run.stop = len(forest.tokens)
        last = run.stop - 1 if len(span) else parent
        todo.append((name, parent, above, goes_on))
        is_only = len(children[name]) == 1
        todo += [(child, last, run, is_only) for child in children[name][::-1]]
    forest.runs = [run for run in forest.runs if run.stop > run.start]
    return forest


def is_read(ends: Tensor, wanted: Tensor) -> Tensor:
    """[L] True for tokens that some wanted token (bool [L]) comes after, so that it reads them.

    The rows behind i and before ends[i] are exactly its descendants: count the wanted among them.
    The last token of an answer is never read; it is only a label.
    """
    counted = F.pad(wanted.long().cumsum(0), (1, 0))  # wanted tokens before each row
    row = torch.arange(len(ends), device=ends.device)
    return counted[ends] > counted[row + 1]


def shorten(runs: list[Run], keep: Tensor) -> list[Run]:
    """The runs over the kept tokens alone, renumbered. What is kept of a run is its beginning."""
    before = F.pad(keep.long().cumsum(0), (1, 0)).tolist()
    short = [
        Run(before[run.start], before[run.stop], [(before[a], before[b]) for a, b in run.path])
        for run in runs
    ]
    return [run for run in short if run.stop > run.start]


def interval_mask(ends: Tensor) -> Tensor:
    """The dense form of the rule, [L, L]: the definition that everything faster is tested against."""
    row = torch.arange(len(ends), device=ends.device)
    return (row[None, :] <= row[:, None]) & (row[:, None] < ends[None, :])


def split_rows(rows: Sequence[Trajectory], budget: int) -> list[list[int]]:
    """Micro-batches of at most `budget` unique tokens, as lists of row numbers.

    Rows of one episode stay together while they fit. A tree larger than the budget is cut between
    its rows: the second part repeats the prefix, and since each row lies in one part only, gradients
    still add up exactly. A single row larger than the budget is a micro-batch of its own.
    """
    parts: list[list[int]] = []
    seen: set[int] = set()
    used = 0
    by_episode: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        by_episode.setdefault(id(row.episode), []).append(number)
    for numbers in by_episode.values():
        whole = {id(span): len(span) for number in numbers for span in rows[number].spans}
        if parts and used + sum(whole.values()) > budget and used:
            parts.append([])  # do not start a tree that would have to be cut here
            seen, used = set(), 0
        for number in numbers:
            new = {id(s): len(s) for s in rows[number].spans if id(s) not in seen}
            if not parts or (parts[-1] and used + sum(new.values()) > budget):
                parts.append([])
                new = {id(s): len(s) for s in rows[number].spans}
                seen, used = set(), 0
            parts[-1].append(number)
            seen |= new.keys()
            used += sum(new.values())
    return parts
