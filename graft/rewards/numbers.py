"""Numbers in texts, compared by value: "1,200", "1.2e3" and "1200.0" are the same one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

_NUMBER = re.compile(
    r"([+-]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+))([eE][+-]?[0-9]{1,3})?"
)
_MINUS = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-"))
"""Typeset signs and dashes that stand for the minus of a number."""
_GROUP_BLANK = re.compile(r"(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3}(?![0-9]))")
"""The blank of "1 200" as it is typeset; an ordinary one may separate two numbers."""

MAX_NUMBER_LENGTH = 200  # characters; int() is quadratic, and no answer is longer


def parse_number(text: str) -> Fraction | None:
    """The exact number that a text states; None if it is anything else.

    >>> parse_number(" -1,234.50 "), parse_number("1e-05")
    (Fraction(-2469, 2), Fraction(1, 100000))
    """
    if len(text) > MAX_NUMBER_LENGTH:
        return None
    match = _NUMBER.fullmatch(join_groups(text.strip()).translate(_MINUS))
    if match is None:
        return None
    # Fraction reads "3.e5" only without the point
    return Fraction(match[1].replace(",", "").rstrip(".") + (match[2] or ""))


def join_groups(text: str) -> str:
    """The text with commas in place of the typeset blanks in its numbers, which `split` would part."""
    return _GROUP_BLANK.sub(",", text)


def same_number(a: str, b: str) -> bool:
    """True if both texts are numbers, and the same one: "1,200" and "1200.0"."""
    first, second = parse_number(a), parse_number(b)
    return first is not None and first == second


def is_gold(value: Any) -> bool:
    """False for nothing, and for a number that is not finite: pandas writes NaN for an empty cell."""
    try:
        return value is not None and (isinstance(value, str) or math.isfinite(value))
    except (TypeError, ValueError, OverflowError):  # no number, or a larger one than a float holds
        return True


def each_gold(answer: Any) -> Iterable[Any]:
    """The golds of a task: the items of a list, a tuple or an array, else the answer alone."""
    is_array = getattr(answer, "ndim", 0) > 0
    return answer if is_array or isinstance(answer, list | tuple) else [answer]
