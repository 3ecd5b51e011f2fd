r"""Parse a tidy answer: a number, a formula, words, or several numbers.

"\frac{1}{2}"    a Formula
"1,200"          the Number 1200; so are "1 1/2", "1.2 million" and "0.\overline{3}"
"(1,2]"          Several numbers in brackets
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from graft.rewards.maths.ball_arithmetic import Unreadable
from graft.rewards.maths.formulas import Formula, read_formula
from graft.rewards.maths.spelling import SCALES


class Number(NamedTuple):
    """A number on its own, as written: 1,200 or 3.50 or 12%."""

    value: Fraction
    is_decimal: bool
    is_percent: bool


class Words(NamedTuple):
    """Plain words: "no solution"."""

    text: str


class Several(NamedTuple):
    """(1, 2], or 1, 2 without brackets, which has no order."""

    brackets: str
    items: tuple[Number | Formula, ...]

    @property
    def has_order(self) -> bool:
        return self.brackets.startswith(("(", "["))


Reading = Number | Formula | Words | Several

_NUMBER = re.compile(
    r"([-+]?)\$?((?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)\s*(%?)",
    re.ASCII,
)
_MIXED = re.compile(r"([-+]?)([0-9]{1,18}) ([0-9]{1,18})/([0-9]{1,18})", re.ASCII)  # 1 1/2
_SCIENTIFIC = re.compile(r"[-+]?[0-9]{1,18}(?:\.[0-9]{1,18})?[eE][-+]?[0-9]{1,3}", re.ASCII)
_REPEATING = re.compile(
    r"([-+]?)([0-9]{0,18})\.([0-9]{0,18})\\(?:overline|bar)\s*\{?([0-9]{1,18})\}?", re.ASCII
)  # 0.1\overline{6}
_SCALED = re.compile(rf"(.*[0-9])\s*({'|'.join(SCALES)})s?", re.IGNORECASE)  # 1.2 million
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*")
_LIST = re.compile(r"(\(|\[|\\\{)?(.*?)(\)|\]|\\\})?", re.DOTALL)
_ENDLESS = {  # the end of an interval; larger than any number that is parsed here
    sign + "\\infty": Number(Fraction(factor * 10**500), False, False)
    for sign, factor in (("", 1), ("+", 1), ("-", -1))
}
_THOUSANDS = re.compile(r"[0-9],\s?[0-9]{3}(?![0-9])")


@lru_cache(maxsize=8192)
def read(text: str) -> Reading | None:
    """A tidy text as one of the kinds that `compare` handles; None for any other text."""
    if (number := read_number(text)) is not None:
        return number
    if _WORDS.fullmatch(text) and any(len(word) > 2 for word in re.split(r"[' -]", text)):
        return Words("".join(text.lower().split()))
    try:
        if "," in text:
            return _read_several(text)
        return read_formula(text)
    except Unreadable:
        return None


def read_number(text: str) -> Number | None:
    """A number in any of the usual notations; None for anything else."""
    if (number := _NUMBER.fullmatch(text)) is not None:
        value = Fraction((number[1] + number[2].replace(",", "")).rstrip("."))
        return Number(value, "." in number[2].rstrip("."), bool(number[3]))
    if _SCIENTIFIC.fullmatch(text):
        return Number(Fraction(text), "." in text, False)
    if (mixed := _MIXED.fullmatch(text)) is not None and int(mixed[3]) < int(mixed[4]):
        value = int(mixed[2]) + Fraction(int(mixed[3]), int(mixed[4]))
        return Number(-value if mixed[1] == "-" else value, False, False)
    if (repeating := _REPEATING.fullmatch(text)) is not None:
        sign, whole, before, period = repeating.groups()
        tail = Fraction(int(period), 10 ** len(period) - 1) / 10 ** len(before)
        value = Fraction(f"{whole or 0}.{before or 0}") + tail
        return Number(-value if sign == "-" else value, True, False)
    if (scaled := _SCALED.fullmatch(text)) is not None:
        number = read_number(scaled[1].strip())
        if number is not None and not number.is_percent:
            return number._replace(value=number.value * SCALES[scaled[2].lower()])
    return None


def _read_several(text: str) -> Several | None:
    opening, inside, closing = _LIST.fullmatch(text).groups()  # pyright: ignore
    if bool(opening) != bool(closing) or _THOUSANDS.search(inside):
        return None
    if opening and (opening in "([") != (closing in ")]"):
        return None
    items: list[Number | Formula] = []
    for part in inside.split(","):
        item = _ENDLESS.get(part.strip()) or read(part.strip())
        if not isinstance(item, Number | Formula):
            return None
        items.append(item)
    return Several((opening or "") + (closing or ""), tuple(items))
