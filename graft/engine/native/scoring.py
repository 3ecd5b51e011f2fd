"""How likely continuations are after many places of several texts, in one forward over trees.

    T tokens of the trunk, P places, U log-probs

    trunk 1 2 3 4, places 2 and 4, continuation "a b c"      rows   0 1 2 3 4 5 6 7
        1 2 3 4                                              tokens 1 2 3 4 a b a b
        |   └── a b   (c is only asked for)                  ends   8 8 6 6 6 6 8 8
        └── a b

The trunk comes first, then the branches from its last place back to its first: so the descendants
of a token are one interval, as `packing` has them. The last action of a continuation is a label and
no row; of a continuation of one action nothing is computed but the head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graft.models.decoder import Decoder
from graft.models.device import has_kernels
from graft.models.logprobs import action_logprobs
from graft.models.tree.attention import attention_over, why_no_kernel
from graft.models.tree.packing import TokenRun
from graft.transfer import transfer

MOST_ROWS = 1 << 14
"""Rows of a forward; a trunk longer than that goes with one place at a time."""
MOST_GATHERED = 1 << 25
"""Elements of keys that plain attention gathers for branches, each of which reads its whole past."""

Scores = list[list[list[float]]]

Place = tuple[int, int]
"""The number of a text, and how many of its tokens come before."""


@torch.no_grad()  # not inference_mode: the trainer must be able to use what we touch
def score(
    decoder: Decoder,
    texts: Sequence[Sequence[int]],
    at: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    mode: int,
    allowed: Tensor | None,
    temperature: float = 1.0,
) -> list[Scores]:
    """Of each text, [i][j][k]: of action k of continuations[j] right after text[: at[i]]."""
    if not continuations:
        return [[[] for _ in places] for places in at]
    found: dict[Place, list[list[float]]] = {}
    wanted = [(text, place) for text, places in enumerate(at) for place in sorted(set(places))]
    for part in _parts(decoder, wanted, continuations):
        found |= _score_part(decoder, texts, part, continuations, mode, allowed, temperature)
    return [[found[text, place] for place in places] for text, places in enumerate(at)]


def _parts(
    decoder: Decoder, wanted: list[Place], continuations: Sequence[Sequence[int]]
) -> list[list[Place]]:
    """The places, in their order, in runs that one forward can hold."""
    branch = sum(len(actions) - 1 for actions in continuations)
    branches = sum(len(actions) > 1 for actions in continuations)
    shape, device = decoder.shape, decoder.device
    has_kernel = has_kernels(device) and not why_no_kernel(shape.head_dim, decoder.dtype, device)
    gathers = 0 if has_kernel else branches * shape.kv_size
    parts: list[list[Place]] = []
    rows = gathered = trunk = 0  # rows of branches and of trunks that are complete
    for text, place in wanted:
        if parts and parts[-1][-1][0] != text:
            rows += trunk  # the trunk before ends with its last place
        trunk = place
        rows, gathered = rows + branch, gathered + gathers * (place + branch)
        if not parts or rows + trunk > MOST_ROWS or gathered > MOST_GATHERED:
            parts.append([])
            rows, gathered = branch, gathers * (place + branch)
        parts[-1].append((text, place))
    return parts


class Trees:
    """The rows of a forward while they are written down, and what is asked of them."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.ends: list[int] = []
        self.runs: list[TokenRun] = []
        self.before: list[int] = []  # the row whose hidden state each asked action follows
        self.actions: list[int] = []

    def add(
        self, text: Sequence[int], places: list[int], continuations: Sequence[Sequence[int]]
    ) -> None:
        """A trunk up to the last of its places, ascending, and branches from there back."""
        first, trunk = len(self.tokens), places[-1]
        self.tokens += text[:trunk]
        self.positions += range(trunk)
        self.ends += [0] * trunk
        self.runs.append(TokenRun(first, first + trunk, []))
        filled = trunk  # tokens of the trunk whose end is known
        for place in reversed(places):
            # branches of this place and of earlier ones come behind those that end here
            self.ends[first + place : first + filled] = [len(self.tokens)] * (filled - place)
            filled = place
            for actions in continuations:
                start, fed = len(self.tokens), actions[:-1]
                self.tokens += fed
                stop = len(self.tokens)
                self.positions += range(place, place + len(fed))
                self.ends += [stop] * len(fed)
                if fed:
                    self.runs.append(TokenRun(start, stop, [(first, first + place)]))
                self.before += [first + place - 1, *range(start, stop)]
                self.actions += actions
        self.ends[first : first + filled] = [len(self.tokens)] * filled


def _score_part(
    decoder: Decoder,
    texts: Sequence[Sequence[int]],
    part: list[Place],
    continuations: Sequence[Sequence[int]],
    mode: int,
    allowed: Tensor | None,
    temperature: float,
) -> dict[Place, list[list[float]]]:
    """[j][k] of each place."""
    places: dict[int, list[int]] = {}
    for text, place in part:
        places.setdefault(text, []).append(place)
    rows = Trees()
    for text, some in places.items():
        rows.add(texts[text], some, continuations)
    device, shape = decoder.device, decoder.shape
    placed = transfer(
        {
            name: torch.tensor(getattr(rows, name))
            for name in ("tokens", "positions", "before", "actions")
        },
        device,
    )
    attend = attention_over(rows.runs, torch.tensor(rows.ends), shape.heads, shape.kv_heads, device)
    hidden = decoder(placed["tokens"], placed["positions"], attend)
    logp, _ = action_logprobs(
        hidden.index_select(0, placed["before"]),
        decoder.head_weight,
        placed["actions"],
        modes=torch.full_like(placed["actions"], mode),
        allowed=allowed,
        temperature=temperature,
    )
    left = iter(logp.tolist())
    return {
        (text, place): [[next(left) for _ in actions] for actions in continuations]
        for text, some in places.items()
        for place in reversed(some)
    }
