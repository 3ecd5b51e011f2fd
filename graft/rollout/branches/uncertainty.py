"""How unsure a policy is after an observation, and how likely it makes a fork.

first 3 tokens     entropies in nats        mean    / ln 16, the vocabulary
of the attempt     0.2  0.9  0.4            0.50    0.18    the baseline
after a result     1.3  1.1  0.6            1.00    0.36

change 0.36 - 0.18 = 0.18;  probability 0.5 + 0.2 * 0.18 = 0.536;  branched twice in a row just
before, at 0.05 each: 0.536 * (1 - 0.1) = 0.482
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from graft.types import Author, Span


def mean_entropy(entropies: Sequence[float], vocab_size: int) -> float:
    """From 0 (sure) to 1 (any of the vocabulary); of no token at all, 0.

    >>> round(mean_entropy([0.2, 0.9, 0.4], 16), 2)
    0.18
    """
    if not entropies:
        return 0.0
    return sum(entropies) / len(entropies) / math.log(max(vocab_size, 2))


def first_decisions(spans: Sequence[Span], tokens: int) -> list[float]:
    """Entropies of the first decisions of a turn; tokens that continue a decision do not count."""
    chosen = [h for s in spans for h, is_own in zip(s.entropies, s.mask, strict=True) if is_own]
    return chosen[:tokens]


def turn_entropies(spans: Sequence[Span], tokens: int, vocab_size: int) -> list[float]:
    """`mean_entropy` of the first decisions of every turn: [first, after a result, ...]."""
    turns: list[list[Span]] = []
    previous = None
    for span in spans:
        if span.author is Author.POLICY:
            if previous is not Author.POLICY:
                turns.append([])
            turns[-1].append(span)
        previous = span.author
    return [mean_entropy(first_decisions(turn, tokens), vocab_size) for turn in turns]


def probability(
    base: float, weight: float, change: float, penalty: float = 0.0, in_a_row: int = 0
) -> float:
    """Probability of a fork here: clip(base + weight * change) * (1 - penalty * in_a_row), never negative.

    >>> probability(0.5, 0.2, 0.18), round(probability(0.5, 0.2, 0.18, 0.05, 2), 4)
    (0.536, 0.4824)
    """
    return min(max(base + weight * change, 0.0), 1.0) * max(1.0 - penalty * in_a_row, 0.0)


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)), without overflow."""
    if x >= 0:
        return 1 / (1 + math.exp(-x))
    small = math.exp(max(x, -700.0))
    return small / (1 + small)


def root_budget(samples: int, sensitivity: float, root: float, after_results: float) -> int:
    """How many of `samples` begin at the prompt: more where the policy is unsure there.

    samples * sigmoid(sensitivity * (root - after_results)), rounded, at least 1:

    >>> root_budget(16, 0.5, 0.3, 0.3), root_budget(16, 4.0, 0.9, 0.4), root_budget(16, 4.0, 0.4, 0.9)
    (8, 14, 2)
    """
    share = sigmoid(sensitivity * (root - after_results))
    return min(max(round(samples * share), 1), samples)
