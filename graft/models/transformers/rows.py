"""Plain packing: each path of a forest as one row, for models that accept no tree mask.

    R paths, C tokens of the longest, K tokens of the forest, U trained ones

    "12" -> "abc"        forest   0 1 2 3 4 5 6      rows   1 2 a b c      index   0 1 2 3 4
         -> "de"         tokens   1 2 a b c d e             1 2 d e .              0 1 5 6 6

Rows are padded at the end, where padding cannot affect a causal model. The prompt is computed in both
rows and read from the first only, so a trained token counts once, and its gradient is that of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from graft.models.tree.packing import TokenRun


def paths_of(runs: Sequence[TokenRun]) -> list[np.ndarray]:
    """The token indices of each path from a root to a leaf."""
    above = {interval for run in runs for interval in run.path}
    return [
        np.concatenate([np.arange(a, b) for a, b in [*run.path, (run.start, run.stop)]])
        for run in runs
        if (run.start, run.stop) not in above
    ]


def path_rows(runs: Sequence[TokenRun]) -> tuple[Tensor, Tensor]:
    """[R, C] the forest token in each cell, and [K] the cell (r * C + c) that each token is read from."""
    paths = paths_of(runs)
    longest = max(map(len, paths), default=0)
    index = np.zeros((len(paths), longest), dtype=np.int64)
    cells = np.zeros(max((run.stop for run in runs), default=0), dtype=np.int64)
    for number in reversed(range(len(paths))):  # the first row that holds a token is written last
        path = paths[number]
        index[number, : len(path)] = path
        index[number, len(path) :] = path[-1]
        cells[path] = number * longest + np.arange(len(path))
    return torch.from_numpy(index), torch.from_numpy(cells)
