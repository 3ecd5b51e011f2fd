"""Checks in front of reasoning-gym's scorers, some of which accept answers that solve nothing.

    puzzle24             "1*2*3*4" for the numbers 5, 7, 8, 8     the library 1.0, here 0.0
    countdown            "(a-a)*6*64*8*62 + a/a + ..."            the library 1.0, here 0.0
    prime_factorization  "12" for 2 x 2 x 3                       the library 0.5, here 0.0
    coin_flip            "0" for 0.00012                          the library 1.0, here 0.0
    complex_arithmetic   "nan"                                    the library 1.0, here 0.0
    propositional_logic  any text                                 the library 0.1, here 0.0

`score_item` is called in a worker process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from fractions import Fraction
from typing import Any

from graft.rewards.answers import countdown_score

NONSENSE = ("x", "0", "0 0", "[]", "{}")
"""Answers that solve nothing. An answer earns what the library gives beyond the best of them."""
MAX_FOR_NOTHING = 0.1
"""The most that a scorer of the library gives for any text."""
NEAR = Fraction(1, 1000)
"""How far a probability may be off, as a share of it; and at most a tenth of this in all."""

_NOT_FINITE = re.compile(
    r"(?<![a-z])(?:nan|inf|infinity|infty|oo|zoo)(?:[ij]|nan|inf)?(?![a-z])|\u221e|[0-9.]e[+-]?[0-9]{3}",
    re.IGNORECASE,
)
"""nan, inf, 1e999: numbers that compare with every number, or with none."""

Scorer = Callable[[str, Mapping[str, Any]], float]


def score_item(
    score_answer: Callable[[str, Any], Any], answer: str, entry: Mapping[str, Any]
) -> float:
    """The score of one answer, from 0 to 1; 0 where it cannot be read."""
    source = entry["metadata"].get("source_dataset")
    if (own := OWN.get(str(source))) is not None:
        return _within(own, answer, entry)
    if _NOT_FINITE.search(answer) and not _NOT_FINITE.search(str(entry["answer"])):
        return 0.0
    value = _within(score_answer, answer, entry)
    if 0 < value <= MAX_FOR_NOTHING:
        nothing = max(_within(score_answer, text, entry) for text in NONSENSE)
        return value if value > nothing else 0.0
    return value


def _within(scorer: Callable[[str, Any], Any], answer: str, entry: Mapping[str, Any]) -> float:
    with suppress(Exception):  # scorers raise anything on text that they cannot parse
        value = float(scorer(answer, entry))
        return max(0.0, min(value, 1.0)) if math.isfinite(value) else 0.0
    return 0.0


def _expression(target: str | int) -> Scorer:
    def score(answer: str, entry: Mapping[str, Any]) -> float:
        known = entry["metadata"]
        wanted = Fraction(known[target] if isinstance(target, str) else target)
        return countdown_score(answer, known["numbers"], wanted)

    return score


def _probability(answer: str, entry: Mapping[str, Any]) -> float:
    """A fraction or decimal number; the library also accepts 0 for everything near it, and any prefix."""
    given, right = Fraction(answer.replace(",", "").strip()), Fraction(str(entry["answer"]))
    return float(abs(given - right) <= min(NEAR * right, NEAR / 10))


def _factors(answer: str, entry: Mapping[str, Any]) -> float:
    """The prime factors in any order; the library gives 0.5 for the number itself."""
    given, right = (
        sorted(int(factor) for factor in re.split(r"[\u00d7x*]|\\times|\\cdot", text))
        for text in (answer, str(entry["answer"]))
    )
    return float(given == right)


def _halting(answer: str, entry: Mapping[str, Any]) -> float:
    """The library accepts any text as "True"."""
    return float(answer.lower() == str(entry["answer"]).lower())


OWN: dict[str, Scorer] = {
    "coin_flip": _probability,
    "countdown": _expression("target"),
    "game_of_life_halting": _halting,
    "prime_factorization": _factors,
    "puzzle24": _expression(24),
}
"""Datasets whose scorer is replaced."""
