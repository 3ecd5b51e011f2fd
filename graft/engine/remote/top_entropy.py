"""The entropy of a distribution of which only the likeliest tokens are known.

Backends tell the log-probs of the k likeliest tokens and of the one that was drawn. Their share of
the entropy is exact. None of the others is likelier than the last of the k, so what is left of the
mass counts as if all of it were as likely: less would be impossible.

    truth .5 .25 .125 .125, entropy 1.213; known .5 .25
        of the two      .5 ln 2 + .25 ln 4  = 0.693
        of the rest     .25 ln 4            = 0.347      together 1.040, a lower bound
"""

from __future__ import annotations

import math
from collections.abc import Sequence

TOP_K = 20
"""Likeliest tokens that are asked for: what vLLM gives unless it is told otherwise."""


def entropy_of(top: Sequence[float], drawn: float = -math.inf) -> float:
    """At least this much, of the log-probs of the likeliest tokens and of the one that was drawn.

    >>> round(entropy_of([math.log(0.5), math.log(0.25)]), 3)
    1.04
    """
    least = min(top)
    known = [*top, drawn] if drawn < least else top  # a rare draw is not among the likeliest
    mass = entropy = 0.0
    for logp in known:
        p = math.exp(logp)
        mass += p
        if p:  # cut away by top-p and the like
            entropy -= p * logp
    rest = 1.0 - mass
    return entropy - rest * least if rest > 0 and math.isfinite(least) else entropy


def known_tokens(vocab_size: int, asked: int = TOP_K) -> int:
    """`entropy_top_k` of an engine: how many tokens its entropies know of, 0 if that is all of them."""
    return 0 if asked >= vocab_size else asked
