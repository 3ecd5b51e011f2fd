"""Drafted tokens in a step: places of draws after them, and which of them are right.

    row   tokens so far   draft     draws after        accepted
    0     .. 4            7 8 9     4, 7, 8, 9         4 -> 7, 7 -> 8, 8 -> 2: 7 8 2 are written
    1     .. 6            -         6                  6 -> 3

A draw is a function of (seed, key, position) and of the logits, and these have the same bits whether their
tokens come together or one by one. So a drafted token is right if and only if it is drawn.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from graft.engine.native.request import Draw, SampleRequest


class DrawPlace(NamedTuple):
    """A draw of a request, after some tokens of its draft."""

    request: SampleRequest
    drafted: list[int]
    mode: int

    @property
    def length(self) -> int:
        """Tokens before the draw."""
        return len(self.request.sequence.tokens) + len(self.drafted)

    @property
    def must_go_on(self) -> bool:
        """Whether no stop token may be drawn yet."""
        return self.request.must_go_on_after(len(self.drafted))


class Drawn(NamedTuple):
    """What was drawn at a place."""

    action: int
    logprob: float
    entropy: float


class Draft(NamedTuple):
    """Tokens that may follow; `modes` are those in which they are drawn, and one more."""

    tokens: list[int]
    modes: list[int]


def places_of(request: SampleRequest, draft: Draft | None) -> list[DrawPlace]:
    """The draws of a step: one, and one after each drafted token."""
    if draft is None:
        return [DrawPlace(request, [], request.mode)]
    counts = range(len(draft.tokens) + 1)
    return [DrawPlace(request, draft.tokens[:count], draft.modes[count]) for count in counts]


def accept(request: SampleRequest, draft: Draft | None, drawn: list[Drawn]) -> Draw:
    """The draws up to the first that the draft did not expect."""
    tokens = [] if draft is None else draft.tokens
    count = 0
    while (
        count < len(tokens)
        and drawn[count].action == tokens[count]
        and not math.isnan(drawn[count].logprob)
    ):
        count += 1
    actions, logprobs, entropies = zip(*drawn[: count + 1], strict=True)
    return Draw(request, list(actions), list(logprobs), list(entropies))
