"""How an attempt at countdown used its calculator, as EARL's analysis counts it.

numbers 3, 5, 7     " calculate 5 + 7 = 12\\n That is far from 4. calculate 12 / 2 = 6\\n"
                    2 calls; 1 with invalid numbers (12 and 2 were not given); 1 planning phrase

A call counts if its result is a number, in EARL's actions as well as in tags. EARL's published table lists
more planning phrases than the three that are known here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

PHRASES = ("not close", "far from", "different approach")

_RESULT = r"\s*+(-?\d++(?:\.\d++)?)"
_CALLS = (
    re.compile(r"\bcalculate\s([0-9.+\-*/()\s]*+)=" + _RESULT),
    re.compile(r"<calculator>([0-9.+\-*/()\s]*+)</calculator>\s*+<result>" + _RESULT),
)
_NUMBER = re.compile(r"\d++(?:\.\d++)?")


class CountdownUse(NamedTuple):
    """What one attempt did."""

    calls: int
    invalid: int
    """Calls with a number that was not given."""
    phrases: int


def countdown_use(
    text: str, numbers: Collection[int], phrases: Sequence[str] = PHRASES
) -> CountdownUse:
    """
    >>> countdown_use(" calculate 5 + 7 = 12\\n far from it", [3, 5, 7])
    CountdownUse(calls=1, invalid=0, phrases=1)
    """
    given = {float(number) for number in numbers}
    found = [expression for calls in _CALLS for expression, _ in calls.findall(text)]
    used = [{float(number) for number in _NUMBER.findall(expression)} for expression in found]
    spoken = text.lower()
    return CountdownUse(
        calls=len(used),
        invalid=sum(not one <= given for one in used),
        phrases=sum(spoken.count(phrase.lower()) for phrase in phrases),
    )
