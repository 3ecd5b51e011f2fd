"""Find where in a finished attempt a call could have been made: positions, their scores, and a draw.

Position 4 lies before token 4, after tokens 0 to 3.

    token     0      1    2    3        4    5     6        7
    text      2+3=?  I    add  compare  A    : <   So       <eos>
    author    task   -- policy, language --  env   - policy, language -
    action           I    add  routing  A          So       <eos>
    insertable       1    2                        6        7

The routing action starts a call anyway, inside the call no text may stand, and an observation is not
a decision of the policy. A score measures how near the policy was to calling there:

    position   log-prob of the word " compare"   of the routing action   score, temperature 10
    1          -9                                -8                      -0.8
    2          -2                                -5                      -0.2

Top-k keeps the best positions, top-p of those as many as carry that share, then one is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from graft.types import Author, Span


def insertable(spans: Sequence[Span], language: int, vocab_size: int) -> list[int]:
    """Positions before a vocabulary token that the policy chose in mode `language`."""
    found: list[int] = []
    start = 0
    for span in spans:
        if span.author is Author.POLICY:
            chosen = zip(span.actions, span.modes, strict=True)
            found += [
                start + i
                for i, (action, mode) in enumerate(chosen)
                if mode == language and 0 <= action < vocab_size
            ]
        start += len(span)
    return found


def score(logprobs: Sequence[Sequence[float]], temperature: float) -> float:
    """How near a call was: the likeliest way to begin one, a way being one or more decisions.

    >>> score([[-2.0, -1.0], [-5.0]], temperature=10)  # a word of two tokens, a routing action
    -0.3
    """
    return max(math.fsum(way) for way in logprobs) / temperature


def weights(scores: Sequence[float], top_k: int, top_p: float) -> list[float]:
    """The probability of each position: softmax over the `top_k` best, cut to a share of `top_p`.

    scores log 4, log 3, log 2, log 1; top_k 3: 4/9, 3/9, 2/9; top_p 0.7: 4/7, 3/7, 0, 0. The
    position that reaches the share is kept, so one always is; of equal scores the earlier one is first.
    """
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[:top_k]
    best = max(scores)
    mass = [math.exp(scores[i] - best) for i in order]
    total, reached = math.fsum(mass), 0.0
    kept: dict[int, float] = {}
    for i, part in zip(order, mass, strict=True):
        if reached >= top_p * total:
            break
        kept[i] = part
        reached += part
    return [kept.get(i, 0.0) / reached for i in range(len(scores))]


def draw(chances: Sequence[float], uniform: float) -> int:
    """The index at which the running sum of `chances` passes `uniform`, a number in [0, 1).

    >>> [draw([0.5, 0.0, 0.5], u) for u in (0.0, 0.4, 0.5, 0.9)]
    [0, 0, 2, 2]
    """
    reached = 0.0
    for i, chance in enumerate(chances):
        reached += chance
        if uniform < reached:
            return i
    return max(i for i, chance in enumerate(chances) if chance)  # the sum may round to below 1
