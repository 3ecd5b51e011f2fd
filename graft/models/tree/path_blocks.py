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
        index: list[np.ndarray] = []
        tables: dict[int, np.ndarray] = {}  # by the first token of the run
        tiles: list[np.ndarray] = []
        num_blocks = used = 0
        for run in runs:
            depth, path = run.depth, [part for part in run.path if part[0] < part[1]]
            known = depth // BLOCK  # blocks that the path had before this run
            rows = np.concatenate([_last(path, depth % BLOCK), np.arange(run.start, run.stop)])
            own = -(-len(rows) // BLOCK)
            index.append(np.pad(rows, (0, own * BLOCK - len(rows))))
            table = np.arange(num_blocks, num_blocks + own)
            if known:
                table = np.concatenate([tables[path[-1][0]][:known], table])
            tables[run.start] = table
            first = np.arange(0, run.stop - run.start, BLOCK)
            count = np.minimum(run.stop - run.start - first, BLOCK)
            at = np.full(len(first), used)
            tiles.append(np.column_stack([run.start + first, count, depth + first, at]))
            num_blocks, used = num_blocks + own, used + len(table)
        parts = {
            "tiles": _longest_first(np.concatenate(tiles)),
            "table": np.concatenate(list(tables.values())),
            "index": np.concatenate(index),
        }
        small = {name: torch.from_numpy(part.astype(np.int32)) for name, part in parts.items()}
        return cls(**transfer(small, device))


def _last(path: list[tuple[int, int]], count: int) -> np.ndarray:
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
