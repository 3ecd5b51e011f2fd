"""Lay trajectories out as a forest in which every shared token occurs once.

    N rows (trajectories), T columns, L unique tokens of the forest

    two samples of one prompt              rows     0 1 2 3 4 5 6
        "12" -> "abc"                      tokens   1 2 a b c d e
             -> "de"                       ends     7 7 5 5 5 7 7

Spans are written depth first, so the subtree of a span is one interval, and a query sees a key if
`(key <= query) & (query < end[key])`: d (row 5) sees 1 and 2 (their end is 7), and not a, b, c (their
end is 5). `source` maps the grid of leaves back: its row 1 is [5, 6].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from graft.types import Author, Span, Trajectory


@dataclass(slots=True)
class TokenRun:
    """Tokens [start, stop) of the forest without a fork between them."""

    start: int
    stop: int
    path: list[tuple[int, int]]
    """Intervals of the tokens before it on its path, root first."""

    @property
    def depth(self) -> int:
        return sum(stop - start for start, stop in self.path)


@dataclass(slots=True)
class Packed:
    """A forest of L unique tokens, and the token of each element of the leaf grid."""

    tokens: Tensor  # [L]
    positions: Tensor  # [L] distance from the root, for rotary positions
    parents: Tensor  # [L] the token before it on its path; -1 at a root
    ends: Tensor  # [L] first row after the subtree of its span
    actions: Tensor  # [L] the action of each token, whose log-prob is computed
    modes: Tensor  # [L] the mode, whose mask applies
    masks: dict[int, str]  # the rows of modes beyond the action space, see `structure`
    source: Tensor  # [N, T] row of the forest, or L for padding
    runs: list[TokenRun]

    def __len__(self) -> int:
        return len(self.tokens)


def response(trajectory: Trajectory) -> list[Span]:
    """The spans after the prompt: the columns of a row."""
    for first, span in enumerate(trajectory.spans):
        if span.author is not Author.TASK:
            return trajectory.spans[first:]
    return []


def pack(rows: Sequence[Trajectory], width: int | None = None) -> Packed:
    """One forest for these rows; `width` is T.

    Rows share a span when it is the same object, that is, when they come from one Episode.
    """
    children: dict[int, list[int]] = {}
    spans: dict[int, Span] = {}
    roots: list[int] = []
    for row in rows:
        siblings = roots
        for span in row.spans:
            name = id(span)
            if name not in spans:
                spans[name] = span
                children[name] = []
                siblings.append(name)
            siblings = children[name]
    laid_out, ends, runs = _lay_out(roots, children, spans)
    written = [spans[name] for name in laid_out]  # in the order of the forest
    starts, counts, parents, depths = np.array([*laid_out.values()], np.int64).reshape(-1, 4).T
    behind = _integers(map(ends.__getitem__, laid_out), len(laid_out))
    total = int(counts.sum())
    row_numbers = np.arange(total)
    previous = row_numbers - 1
    previous[starts[counts > 0]] = parents[counts > 0]
    columns = [[laid_out[id(span)] for span in response(row)] for row in rows]
    if width is None:
        width = max((sum(count for _, count, _, _ in column) for column in columns), default=0)
    source = np.full((len(rows), width), total, dtype=np.int64)
    places: list[tuple[int, int, int]] = []  # a span's first cell of `source`, its row, its length
    for number, column in enumerate(columns):
        cell = number * width
        for start, count, _, _ in column:
            places.append((cell, start, count))
            cell += count
    cells, first, lengths = np.array(places, np.int64).reshape(-1, 3).T
    source.reshape(-1)[ranges(cells, lengths)] = ranges(first, lengths)
    return Packed(
        tokens=_concatenated([span.tokens for span in written]),
        positions=torch.from_numpy(row_numbers + np.repeat(depths - starts, counts)),
        parents=torch.from_numpy(previous),
        ends=torch.from_numpy(np.repeat(behind, counts)),
        actions=_concatenated([span.actions or span.tokens for span in written]),
        modes=_concatenated([span.modes or [0] * len(span.tokens) for span in written]),
        masks={mode: row for span in written for mode, row in span.masks.items()},
        source=torch.from_numpy(source),
        runs=runs,
    )


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """start, start + 1, ... of each start, as many as its count: [5, 0], [2, 3] -> [5, 6, 0, 1, 2]"""
    before = counts.cumsum() - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


def _integers(values: Iterable[int], count: int) -> np.ndarray:
    return np.fromiter(values, dtype=np.int64, count=count)


def _concatenated(lists: list[list[int]]) -> Tensor:
    # through numpy: torch takes ten times as long to convert a list
    return torch.from_numpy(_integers(chain.from_iterable(lists), sum(map(len, lists))))


_Rows = tuple[int, int, int, int]
"""Of a span in the forest: the first, their number, the row of the token before it (-1 at a root), and how
many tokens its path has before it. A plain tuple, since every span of every batch gets one."""


def _lay_out(
    roots: list[int], children: dict[int, list[int]], spans: dict[int, Span]
) -> tuple[dict[int, _Rows], dict[int, int], list[TokenRun]]:
    """The rows of every span, depth first; the first row after its subtree; and the runs."""
    laid_out: dict[int, _Rows] = {}
    ends: dict[int, int] = {}
    runs: list[TokenRun] = []
    total = 0
    # (span, the rows of its parent, the run of its parent, whether it continues that run)
    todo: list[tuple[int, _Rows | None, TokenRun | None, bool]] = [
        (name, None, None, False) for name in roots[::-1]
    ]
    while todo:
        name, parent, run, continues = todo.pop()
        last, depth, count = -1, 0, len(spans[name].tokens)
        if parent is not None:
            start, length, before, depth = parent
            last, depth = start + length - 1 if length else before, depth + length
        laid_out[name] = rows = total, count, last, depth
        if run is None or not continues:
            path = [] if run is None else [*run.path, (run.start, run.stop)]
            run = TokenRun(total, total, path)
            runs.append(run)
        total += count
        run.stop = total
        below = children[name]
        if len(below) == 1:
            todo.append((below[0], rows, run, True))
        else:
            todo += [(child, rows, run, False) for child in below[::-1]]
    for name, (start, count, _, _) in reversed(laid_out.items()):  # children before their parents
        ends[name] = ends[children[name][-1]] if children[name] else start + count
    return laid_out, ends, [run for run in runs if run.stop > run.start]


def count_before(flags: Tensor) -> Tensor:
    """[L + 1] how many of the first i flags are set. [1, 0, 1] -> [0, 1, 1, 2]"""
    return F.pad(flags.long().cumsum(0), (1, 0))


def is_read(ends: Tensor, wanted: Tensor) -> Tensor:
    """[L] True for tokens before some wanted token (bool [L]), which reads them.

    The rows after i and before ends[i] are its descendants: count the wanted ones among them. The last
    token of an answer is never read; it is only a label.
    """
    counted = count_before(wanted)
    return counted[ends] > counted[1:]


def shorten(runs: list[TokenRun], new_row: Tensor) -> list[TokenRun]:
    """The runs over the kept tokens, which are the beginning of each run.

    `new_row` is [L + 1], the number of kept tokens before each row: its new row.
    """
    new = new_row.numpy()
    short = [
        TokenRun(
            int(new[run.start]),
            int(new[run.stop]),
            [(int(new[a]), int(new[b])) for a, b in run.path],
        )
        for run in runs
    ]
    return [run for run in short if run.stop > run.start]


def interval_mask(ends: Tensor) -> Tensor:
    """The dense form of the rule, [L, L]: the definition that faster implementations are tested against."""
    row = torch.arange(len(ends), device=ends.device)
    return (row[None, :] <= row[:, None]) & (row[:, None] < ends[None, :])


def split_rows(rows: Sequence[Trajectory], budget: int) -> list[list[int]]:
    """Micro-batches of at most `budget` unique tokens, as lists of row numbers.

    Rows of one episode stay together while they fit. A tree larger than the budget is split between
    its rows: the second part repeats the prefix, and since each row is in one part only, gradients
    still add up exactly. A single row larger than the budget is a micro-batch of its own.
    """
    parts: list[list[int]] = []
    seen: set[int] = set()
    used = 0
    by_episode: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        by_episode.setdefault(id(row.episode), []).append(number)
    if sum(len(span.tokens) for row in rows for span in row.spans) <= budget:  # nothing to split
        return [[*chain.from_iterable(by_episode.values())]] if rows else []
    for numbers in by_episode.values():
        whole = {id(span): len(span) for number in numbers for span in rows[number].spans}
        if parts and used + sum(whole.values()) > budget and used:
            parts.append([])  # do not start a tree that would have to be split here
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
