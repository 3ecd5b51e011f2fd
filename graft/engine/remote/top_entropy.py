"""The entropy of a distribution of which only the likeliest tokens are known.

Backends return the log-probs of the k likeliest tokens and of the drawn one. Their share of the entropy
is exact. No other token is likelier than the last of the k, so the rest of the mass counts as if each of
its tokens were that likely: a lower bound.

    truth .5 .25 .125 .125, entropy 1.213; known .5 .25
        of the two      .5 ln 2 + .25 ln 4  = 0.693
        of the rest     .25 ln 4            = 0.347      together 1.040, a lower bound
"""

from __future__ import annotations

import math
from collections.abc import Sequence

TOP_K = 20
"""Likeliest tokens that are requested: vLLM's default limit."""


def entropy_of(top: Sequence[float], drawn: float = -math.inf) -> float:
    """A lower bound from the log-probs of the likeliest tokens and of the drawn one.

    >>> round(entropy_of([math.log(0.5), math.log(0.25)]), 3)
    1.04
    """
    least = min(top)
    known = [*top, drawn] if drawn < least else top  # a rare draw is not among the top
    mass = entropy = 0.0
    for logp in known:
        p = math.exp(logp)
        mass += p
        if p:  # else removed by top-p or the like
            entropy -= p * logp
    rest = 1.0 - mass
    return entropy - rest * least if rest > 0 and math.isfinite(least) else entropy


def known_tokens(vocab_size: int, top_k: int = TOP_K) -> int:
    """`entropy_top_k` of an engine: the tokens its entropies are computed from; 0: all."""
    return 0 if top_k >= vocab_size else top_k
