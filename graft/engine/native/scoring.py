"""How likely continuations are after many places of one text, in one forward over a tree.

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
from typing import NamedTuple

import torch
from torch import Tensor

from graft.models.decoder import Decoder
from graft.models.device import has_kernels
from graft.models.logprobs import action_logprobs
from graft.models.packing import Run
from graft.models.tree_attention import attention_over, why_no_kernel
from graft.transfer import transfer

MOST_ROWS = 1 << 14
"""Rows of a forward; a trunk longer than that goes with one place at a time."""
MOST_GATHERED = 1 << 25
"""Elements of keys that plain attention gathers for branches, each of which reads its whole past."""

Scores = list[list[list[float]]]


@torch.no_grad()  # not inference_mode: the trainer must be able to use what we touch
def score(
    decoder: Decoder,
    tokens: Sequence[int],
    at: Sequence[int],
    continuations: Sequence[Sequence[int]],
    mode: int,
    allowed: Tensor | None,
) -> Scores:
    """[i][j][k]: of action k of continuations[j] right after tokens[: at[i]]."""
    if not continuations:
        return [[] for _ in at]
    found: dict[int, list[list[float]]] = {}
    for places in _parts(decoder, sorted(set(at)), continuations):
        found |= _score_part(decoder, tokens, places, continuations, mode, allowed)
    return [found[place] for place in at]


def _parts(
    decoder: Decoder, places: list[int], continuations: Sequence[Sequence[int]]
) -> list[list[int]]:
    """The places in runs that one forward can hold."""
    branch = sum(len(actions) - 1 for actions in continuations)
    branches = sum(len(actions) > 1 for actions in continuations)
    shape, device = decoder.shape, decoder.device
    has_kernel = has_kernels(device) and not why_no_kernel(shape.head_dim, decoder.dtype, device)
    gathers = 0 if has_kernel else branches * shape.kv_size
    parts: list[list[int]] = []
    rows = gathered = 0
    for place in places:
        # the trunk grows with its last place
        rows, gathered = rows + branch, gathered + gathers * (place + branch)
        if not parts or rows + place > MOST_ROWS or gathered > MOST_GATHERED:
            parts.append([])
            rows, gathered = branch, gathers * (place + branch)
        parts[-1].append(place)
    return parts


class Branches(NamedTuple):
    """A trunk and its branches in rows, and which row's hidden state each asked action follows."""

    tokens: list[int]
    positions: list[int]
    ends: list[int]
    runs: list[Run]
    before: list[int]  # [U]
    actions: list[int]  # [U]


def lay_out(
    tokens: Sequence[int], places: list[int], continuations: Sequence[Sequence[int]]
) -> Branches:
    """Of places in ascending order; what is asked stands in descending order of its place."""
    trunk = places[-1]
    rows, positions = list(tokens[:trunk]), list(range(trunk))
    runs, ends = [Run(0, trunk, [])], [0] * trunk
    before: list[int] = []
    asked: list[int] = []
    filled = trunk  # tokens of the trunk from here on have their end
    for place in reversed(places):
        # no branch from here on sees the trunk behind this place
        ends[place:filled] = [len(rows)] * (filled - place)
        filled = place
        for actions in continuations:
            start, fed = len(rows), actions[:-1]
            rows += fed
            positions += range(place, place + len(fed))
            ends += [len(rows)] * len(fed)
            if fed:
                runs.append(Run(start, len(rows), [(0, place)]))
            before += [place - 1, *range(start, len(rows))]
            asked += actions
    ends[:filled] = [len(rows)] * filled
    return Branches(rows, positions, ends, runs, before, asked)


def _score_part(
    decoder: Decoder,
    tokens: Sequence[int],
    places: list[int],
    continuations: Sequence[Sequence[int]],
    mode: int,
    allowed: Tensor | None,
) -> dict[int, list[list[float]]]:
    """[j][k] of each place."""
    tree = lay_out(tokens, places, continuations)
    device, shape = decoder.device, decoder.shape
    names = ("tokens", "positions", "before", "actions")
    placed = transfer({name: torch.tensor(getattr(tree, name)) for name in names}, device)
    ends = torch.tensor(tree.ends)
    attend = attention_over(tree.runs, ends, shape.heads, shape.kv_heads, device)
    hidden = decoder(placed["tokens"], placed["positions"], attend)
    logp, _ = action_logprobs(
        hidden.index_select(0, placed["before"]),
        decoder.head_weight,
        placed["actions"],
        modes=torch.full_like(placed["actions"], mode),
        allowed=allowed,
    )
    left = iter(logp.tolist())
    return {
        place: [[next(left) for _ in actions] for actions in continuations]
        for place in reversed(places)
    }
