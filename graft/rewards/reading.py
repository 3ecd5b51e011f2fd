r"""What a mathematical answer says: one spelling for it, and what kind of thing it is.

"$\dfrac{1}{2}\text{ cm}$"    tidy: "\frac{1}{2}"          read: a Formula
"1,200"                       tidy: as it is              read: the Number 1200
"(1, 2]"                      tidy: "(1,2]"               read: Several numbers in brackets
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from graft.rewards.balls import Unreadable
from graft.rewards.formulas import Formula, read_formula

_SIZES = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|bigg?|Bigg?|quad|qquad)(?![A-Za-z])"
    r"|(?<!\\)\\[,;:! ]|~"
)
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_WRAPPED = re.compile(r"\$([^$]*)\$|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)
_UNIT = re.compile(r"(?<=[0-9}])\s*\\(?:text|mathrm|mbox)\s*\{\s*([A-Za-z. ]*)\}(?:\^\{?[23]\}?)?$")
_UNIT_WORD = re.compile(
    r"(?<=[0-9])\s*(?:(?:square|cubic|sq\.?|cu\.?)\s+)?(?:dollars?|cents?|euros?|pounds?|rupees?|hours?"
    r"|minutes?|mins?|seconds?|secs?|days?|weeks?|months?|years?|degrees?|radians?|meters?|metres?"
    r"|kilometers?|kilometres?|centimeters?|centimetres?|millimeters?|inch|inches|foot|feet|yards?"
    r"|miles?|km|cm|mm|ft|kg|grams?|kilograms?|ounces?|liters?|litres?|gallons?|mph|units?|points?"
    r"|people|students?|apples?|ways?|times?)$",
    re.IGNORECASE,
)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_DEGREES = re.compile(r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|°)$")
_BLANKS = re.compile(r"\s+")
_IDLE_BLANK = re.compile(r"(?<![A-Za-z0-9.]) | (?![A-Za-z0-9.\\])")
_SYNONYMS = (("\\leq", "\\le"), ("\\geq", "\\ge"), ("\\neq", "\\ne"), ("\\%", "%"), ("\\$", ""))
_SIGNS = str.maketrans({"−": "-", "–": "-", "×": "*", "·": "*", "π": "\\pi "})


@lru_cache(maxsize=8192)
def tidy(text: str) -> str:
    r"""One spelling for what is written in many ways: "$\dfrac{1}{2}\text{ cm}$" -> "\frac{1}{2}".

    What goes is layout (sizes, spaces, dollars), the unit behind a number, and the final stop.
    """
    text = text.strip().removesuffix(".").translate(_SIGNS)
    if (wrapped := _WRAPPED.fullmatch(text)) is not None:
        text = next(part for part in wrapped.groups() if part is not None)
    text = _SIZES.sub(" ", text.replace("{,}", ",").replace("\\!", ""))
    for written, meant in _SYNONYMS:
        text = text.replace(written, meant)
    text = _FRACTION.sub(r"\\frac", text).strip()
    if (unit := _UNIT.search(text)) is not None and unit[1].strip().lower() not in ("or", "and"):
        text = text[: unit.start()]
    text = _UNIT_WORD.sub("", text)
    text = _TEXT.sub(r" \1 ", text).strip()
    text = _DEGREES.sub("", text)
    return _IDLE_BLANK.sub("", _BLANKS.sub(" ", text)).strip()


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
    r"([-+]?)[$£€]?((?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)\s*(%?)",
    re.ASCII,
)
_MIXED = re.compile(r"([-+]?)([0-9]{1,18}) ([0-9]{1,18})/([0-9]{1,18})", re.ASCII)  # 1 1/2
_SCIENTIFIC = re.compile(r"[-+]?[0-9]{1,18}(?:\.[0-9]{1,18})?[eE][-+]?[0-9]{1,2}", re.ASCII)
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*")
_LIST = re.compile(r"(\(|\[|\\\{)?(.*?)(\)|\]|\\\})?", re.DOTALL)
_ENDLESS = {  # the end of an interval; further out than any number that is read here
    sign + "\\infty": Number(Fraction(factor * 10**500), False, False)
    for sign, factor in (("", 1), ("+", 1), ("-", -1))
}
_THOUSANDS = re.compile(r"[0-9],\s?[0-9]{3}(?![0-9])")


@lru_cache(maxsize=8192)
def read(text: str) -> Reading | None:
    """What a tidy text is, if it is something that can be compared here."""
    if (number := _NUMBER.fullmatch(text)) is not None:
        value = Fraction((number[1] + number[2].replace(",", "")).rstrip("."))
        return Number(value, "." in number[2].rstrip("."), bool(number[3]))
    if _SCIENTIFIC.fullmatch(text):
        return Number(Fraction(text), "." in text, False)
    if (mixed := _MIXED.fullmatch(text)) is not None and int(mixed[3]) < int(mixed[4]):
        value = int(mixed[2]) + Fraction(int(mixed[3]), int(mixed[4]))
        return Number(-value if mixed[1] == "-" else value, False, False)
    if _WORDS.fullmatch(text) and any(len(word) > 2 for word in re.split(r"[' -]", text)):
        return Words("".join(text.lower().split()))
    try:
        if "," in text:
            return _read_several(text)
        return read_formula(text)
    except Unreadable:
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
