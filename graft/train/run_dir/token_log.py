"""Advantages and log-probs of a step's episodes, token by token: `learned/step_000012.npz`.

    rows        [R, 3]   line of the episode in `episodes/step_000012.jsonl`, its leaf, the leaf's context
    lengths     [R]      tokens after the prompt of that walk
    advantages  [sum]    one number for each of these tokens, row after row
    logprobs    [sum]    the learner's before its first update; NaN where nothing was trained

The ratio of a token is exp(logprobs - the engine's log-prob in its span).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from graft.files import new_file
from graft.types import Episode

if TYPE_CHECKING:  # commands that show runs begin without them
    import numpy as np
    from torch import Tensor

    from graft.algos.batch import Batch


class TokenRow(NamedTuple):
    """The numbers of one walk, one for each token after its prompt."""

    advantages: np.ndarray
    logprobs: np.ndarray


def learned_path(folder: Path, step: int) -> Path:
    return folder / "learned" / f"step_{step:06d}.npz"


def write_learned(
    folder: Path,
    step: int,
    episodes: Sequence[Episode],
    batch: Batch,
    logprobs_NT: Tensor,
) -> None:
    """Write the file of a step, atomically; `batch` has the advantages."""
    import numpy as np

    from graft.models.tree.packing import response

    lines = {id(episode): number for number, episode in enumerate(episodes)}
    rows = batch.trajectories
    lengths = [sum(map(len, response(row))) for row in rows]
    places = [[lines[id(row.episode)], row.leaf_index, row.context] for row in rows]
    advantages_NT = batch.need("advantages", "a step is recorded after its credit")
    known = logprobs_NT.masked_fill(~batch.mask, float("nan"))
    target = learned_path(folder, step)
    target.parent.mkdir(exist_ok=True)
    with new_file(target) as aside, aside.open("wb") as file:
        np.savez_compressed(
            file,
            rows=np.array(places, np.int32).reshape(-1, 3),
            lengths=np.array(lengths, np.int32),
            advantages=_joined(advantages_NT, lengths),
            logprobs=_joined(known, lengths),
        )


def _joined(grid_NT: Tensor, lengths: Sequence[int]) -> np.ndarray:
    import numpy as np

    grid = grid_NT.float().cpu().numpy()
    parts = [row[:length] for row, length in zip(grid, lengths, strict=True)]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def read_learned(path: Path) -> dict[tuple[int, int, int], TokenRow]:
    """Read the rows, by (line of the episode, leaf, context)."""
    import numpy as np

    with np.load(path) as stored:
        places, lengths = stored["rows"].reshape(-1, 3).tolist(), stored["lengths"]
        advantages, logprobs = stored["advantages"], stored["logprobs"]
    ends = np.cumsum(lengths)
    if not len(advantages) == len(logprobs) == lengths.sum():
        raise ValueError(
            f"{len(places)} rows of together {lengths.sum()} tokens, but {len(advantages)} advantages "
            f"and {len(logprobs)} log-probs"
        )
    found: dict[tuple[int, int, int], TokenRow] = {}
    for (line, leaf, context), end, length in zip(places, ends, lengths, strict=True):
        part = slice(end - length, end)
        found[line, leaf, context] = TokenRow(advantages[part], logprobs[part])
    return found
