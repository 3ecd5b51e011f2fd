"""The keys of a packed forest by position: blocks of 64 counted from the beginning of each path.

    12 -> abc, de, blocks of two      path of abc   12 ab c.      index   0 1  2 3  4 .  5 6
                                      path of de    12 de         tables  0 1 2 | 0 3

The packed list has its own borders: where a token is in it depends on what else is packed. A path's blocks
do not, and the engine's pages are the same blocks, so attention over them can add in one order on both sides
(`kernels.path_attention`). A block lists the rows of its tokens in the forest: keys are addressed, not
copied, and a block that several paths share is listed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from graft.models.tree.packing import TokenRun
from graft.transfer import transfer

BLOCK = 64
"""Positions of a block, and queries of a tile; an engine's page has as many."""

SEGMENT = 4
"""Blocks over which one softmax runs; the segments of a path are merged from first to last."""


@dataclass(slots=True)
class PathBlocks:
    """The work of one forward pass over a forest, on the device, for all layers."""

    tiles: Tensor
    """[n, 4] first query, queries, position of the first, beginning of its path's table."""
    table: Tensor
    """The blocks of all paths, path by path."""
    index: Tensor
    """[blocks * BLOCK] rows of the forest; 0 after the end of a path."""

    @classmethod
    def of(cls, runs: list[TokenRun], device: torch.device) -> PathBlocks:
        """`runs` come after the runs that their paths begin with, as `packing` writes them."""
        # lists of numbers: for a short run numpy takes longer to begin than to compute
        index: list[np.ndarray] = []
        tables: dict[int, list[int]] = {}  # by the first token of the run
        tiles: list[tuple[int, int, int, int]] = []
        num_blocks = used = 0
        for run in runs:
            depth, length = run.depth, run.stop - run.start
            path = [part for part in run.path if part[0] < part[1]]
            known, odd = divmod(depth, BLOCK)  # blocks that the path had before this run
            own = -(-(odd + length) // BLOCK)
            rows = np.zeros(own * BLOCK, np.int64)
            if odd:
                rows[:odd] = last_tokens(path, odd)
            rows[odd : odd + length] = np.arange(run.start, run.stop)
            index.append(rows)
            before = tables[path[-1][0]][:known] if known else []
            tables[run.start] = [*before, *range(num_blocks, num_blocks + own)]
            tiles += [
                (run.start + first, min(BLOCK, length - first), depth + first, used)
                for first in range(0, length, BLOCK)
            ]
            num_blocks, used = num_blocks + own, used + len(tables[run.start])
        parts = {
            "tiles": _longest_first(np.array(tiles)),
            "table": np.array([*chain.from_iterable(tables.values())]),
            "index": np.concatenate(index),
        }
        small = {name: torch.from_numpy(part.astype(np.int32)) for name, part in parts.items()}
        return cls(**transfer(small, device))


def last_tokens(path: list[tuple[int, int]], count: int) -> np.ndarray:
    """The last `count` tokens of a path."""
    parts: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
    for start, stop in reversed(path):
        if count == 0:
            break
        taken = min(count, stop - start)
        parts.append(np.arange(stop - taken, stop))
        count -= taken
    return np.concatenate(parts[::-1])


def _longest_first(tiles: np.ndarray) -> np.ndarray:
    """Sort by the number of their key blocks, so that no long one starts last."""
    return tiles[np.argsort(-((tiles[:, 2] + tiles[:, 1]) // BLOCK), kind="stable")]
