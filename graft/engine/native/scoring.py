"""Log-probs of continuations after many positions of several texts, in one forward over trees.

    trunk 1 2 3 4, positions 2 and 4, continuation "a b c"   rows   0 1 2 3 4 5 6 7
        1 2 3 4                                              tokens 1 2 3 4 a b a b
        |   └── a b   (c is only a label)                    ends   8 8 6 6 6 6 8 8
        └── a b

The trunk comes first, then the branches from its last position back to its first: so the descendants
of a token are one interval, as in `packing`. The last action of a continuation is a label and no row;
for a continuation of one action only the head is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graft.models.decoder import Decoder
from graft.models.device import has_kernels
from graft.models.tree.attention import attention_over, why_no_kernel
from graft.models.tree.packing import TokenRun
from graft.transfer import transfer

MAX_ROWS = 1 << 14
"""Rows of a forward; a longer trunk is computed with one position at a time."""
MAX_GATHERED = 1 << 25
"""Elements of keys that plain attention gathers for branches, each of which reads all tokens before it."""

Scores = list[list[list[float]]]

Position = tuple[int, int]
"""The number of a text, and how many of its tokens come before."""


@torch.no_grad()  # not inference_mode: the trainer uses these tensors too
def score(
    decoder: Decoder,
    texts: Sequence[Sequence[int]],
    at: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    mode: int,
    allowed: Tensor | None,
    temperature: float = 1.0,
) -> list[Scores]:
    """Score each text: log-probs [i][j][k] of action k of continuations[j] right after text[: at[i]]."""
    if not continuations:
        return [[[] for _ in positions] for positions in at]
    found: dict[Position, list[list[float]]] = {}
    wanted = [
        (text, position) for text, positions in enumerate(at) for position in sorted(set(positions))
    ]
    for part in _parts(decoder, wanted, continuations):
        found |= _score_part(decoder, texts, part, continuations, mode, allowed, temperature)
    return [[found[text, position] for position in positions] for text, positions in enumerate(at)]


def _parts(
    decoder: Decoder, wanted: list[Position], continuations: Sequence[Sequence[int]]
) -> list[list[Position]]:
    """The positions, in order, in runs that fit one forward."""
    branch = sum(len(actions) - 1 for actions in continuations)
    branches = sum(len(actions) > 1 for actions in continuations)
    shape, device = decoder.shape, decoder.device
    has_kernel = has_kernels(device) and not why_no_kernel(shape.head_dim, decoder.dtype, device)
    gathers = 0 if has_kernel else branches * shape.kv_size
    parts: list[list[Position]] = []
    rows = gathered = trunk = 0  # rows of branches and of complete trunks
    for text, position in wanted:
        if parts and parts[-1][-1][0] != text:
            rows += trunk  # the previous trunk ends with its last position
        trunk = position
        rows, gathered = rows + branch, gathered + gathers * (position + branch)
        if not parts or rows + trunk > MAX_ROWS or gathered > MAX_GATHERED:
            parts.append([])
            rows, gathered = branch, gathers * (position + branch)
        parts[-1].append((text, position))
    return parts


class ScoringRows:
    """The rows of a forward, and the actions to score after them."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.ends: list[int] = []
        self.runs: list[TokenRun] = []
        self.before: list[int] = []  # the row whose hidden state each scored action follows
        self.actions: list[int] = []

    def add(
        self, text: Sequence[int], positions: list[int], continuations: Sequence[Sequence[int]]
    ) -> None:
        """A trunk up to the last of its ascending positions, and branches from there back."""
        first, trunk = len(self.tokens), positions[-1]
        self.tokens += text[:trunk]
        self.positions += range(trunk)
        self.ends += [0] * trunk
        self.runs.append(TokenRun(first, first + trunk, []))
        filled = trunk  # tokens of the trunk whose end is known
        for position in reversed(positions):
            # branches of this position and of earlier ones come after those that end here
            self.ends[first + position : first + filled] = [len(self.tokens)] * (filled - position)
            filled = position
            for actions in continuations:
                start, fed = len(self.tokens), actions[:-1]
                self.tokens += fed
                stop = len(self.tokens)
                self.positions += range(position, position + len(fed))
                self.ends += [stop] * len(fed)
                if fed:
                    self.runs.append(TokenRun(start, stop, [(first, first + position)]))
                self.before += [first + position - 1, *range(start, stop)]
                self.actions += actions
        self.ends[first : first + filled] = [len(self.tokens)] * filled


def _score_part(
    decoder: Decoder,
    texts: Sequence[Sequence[int]],
    part: list[Position],
    continuations: Sequence[Sequence[int]],
    mode: int,
    allowed: Tensor | None,
    temperature: float,
) -> dict[Position, list[list[float]]]:
    """[j][k] of each position."""
    by_text: dict[int, list[int]] = {}
    for text, position in part:
        by_text.setdefault(text, []).append(position)
    rows = ScoringRows()
    for text, positions in by_text.items():
        rows.add(texts[text], positions, continuations)
    device = decoder.device
    moved = transfer(
        {
            name: torch.tensor(getattr(rows, name))
            for name in ("tokens", "positions", "before", "actions")
        },
        device,
    )
    ends, in_order = torch.tensor(rows.ends), decoder.order is not None
    how = device, in_order, decoder.shape.windows
    attend = attention_over(rows.runs, ends, *decoder.own_heads, *how)
    before = decoder(moved["tokens"], moved["positions"], attend, rows=moved["before"])
    logp, _ = decoder.score_hidden(
        before,
        moved["actions"],
        modes=torch.full_like(moved["actions"], mode),
        allowed=allowed,
        temperature=temperature,
    )
    left = iter(logp.tolist())
    return {
        (text, position): [[next(left) for _ in actions] for actions in continuations]
        for text, positions in by_text.items()
        for position in reversed(positions)
    }
