"""The learner's record of a step: advantage and log-prob of every token it trained on.

`learned/step_000012.npz` holds flat arrays, row after row; a row is one walk behind its prompt:

    rows        [[0, 0, 0], [0, 1, 0]]      line of the episode, leaf, context
    lengths     [3, 2]
    advantages  [1.0, 1.0, 0.0, -1.0, -1.0]
    logprobs    [-0.1, -0.2, nan, -1.2, -0.3]      NaN where nothing was trained
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class LearnedRow(NamedTuple):
    """One number per token behind the prompt."""

    advantages: list[float]
    logprobs: list[float]


class LearnedStep:
    """The files of a run; the last one read stays in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept: tuple[Any, dict[str, Any]] | None = None

    def row(self, step: str, line: int, leaf: int, context: int) -> LearnedRow | str:
        """The numbers of one walk, or the reason why there are none."""
        path = self.folder / f"step_{int(step):06d}.npz" if step.isdigit() else self.folder / step
        try:
            seen = path.stat()
        except OSError:
            return "this step has no file under learned/: the run was made without one"
        key = (path, seen.st_ino, seen.st_mtime_ns, seen.st_size)
        if self._kept is None or self._kept[0] != key:
            try:
                self._kept = (key, _read(path))
            except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
                return f"{path.name} cannot be read: {error}"
        table = self._kept[1]
        place = table["places"].get((line, leaf, context))
        if place is None:
            return "the learner did not take this attempt"
        part = slice(table["starts"][place], table["starts"][place + 1])
        return LearnedRow(table["advantages"][part].tolist(), table["logprobs"][part].tolist())


def _read(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as file:
        rows, lengths = file["rows"].reshape(-1, 3), file["lengths"]
        flat = {name: file[name].astype(np.float64) for name in ("advantages", "logprobs")}
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(int)
    if len(rows) != len(lengths) or any(len(values) != starts[-1] for values in flat.values()):
        raise ValueError(
            f"{len(rows)} rows of together {starts[-1]} tokens, but "
            f"{len(flat['advantages'])} advantages and {len(flat['logprobs'])} log-probs"
        )
    places = {tuple(row): i for i, row in enumerate(rows.tolist())}
    return {"places": places, "starts": starts.tolist(), **flat}
