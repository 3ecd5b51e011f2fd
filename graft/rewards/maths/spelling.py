r"""Normalise the spelling of mathematical answers.

spell    clean LaTeX with the same meaning      "2*sqrt(3)."  ->  "2*\sqrt{3}"
tidy     that, without layout and units         "$\dfrac{1}{2}\text{ cm}$"  ->  "\frac{1}{2}"
"""

from __future__ import annotations

import re
from functools import lru_cache

SCALES = {
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
# fmt: off
_MEANT = frozenset((
    "and", "or", "nor", "not", "no", "if", "of", "to", "than", "more", "less", "least", "most", "half",
    "plus", "minus", "times", "divided", "over", "squared", "cubed", "factorial", "percent", "base",
    "mod", "modulo", "except", "per",
))
# fmt: on
"""Words after a number that change its meaning; any other word there is a unit."""

_SIGNS = str.maketrans(
    {
        "−": "-", "–": "-", "‐": "-", "‑": "-", "‒": "-", "﹣": "-", "－": "-",
        "×": "*", "·": "*", "÷": "\\div ", "π": "\\pi ", "∞": "\\infty ",
        "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "∪": "\\cup ", "∅": "\\emptyset ", "√": "\\sqrt ",
        "°": "^\\circ ", "€": "", "£": "", "¥": "",
    }
)  # fmt: skip
_ENDING = re.compile(r"(?<![\s.,;])(?:[\s.,;]|\\\\|\\[.,;! ])+$")
_WRAPPED = re.compile(r"\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)
_GROUPED = re.compile(
    r"(?<![0-9.])[0-9]{1,3}(?:(?:\\[, ]|~|\{,\}|[\u00a0\u2009\u202f])[0-9]{3})+(?![0-9])"
)
_GROUP_MARK = re.compile(r"[^0-9]+")
_SPELLINGS = [
    (re.compile(pattern), meant)
    for pattern, meant in (
        (r"(?<!\\)\$|\\!", ""),
        (r"\{,\}", ","),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(le|ge|ne)q(?![A-Za-z])", r"\\\1"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"\\(?:[cl]?dots|dotsc)(?![A-Za-z])", r"\\ldots"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\lg(?![A-Za-z])", r"\\log_{10}"),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        (r"(?:(?<![A-Za-z\\])|\\)sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![A-Za-z\\])sqrt(?=[0-9{])", r"\\sqrt"),
        (r"\\sqrt\s*([0-9]{2,})", r"\\sqrt{\1}"),
        (r"(?<=[0-9A-Za-z)])\*\*\s*(-?[0-9]+)", r"^{\1}"),
        (r"(?<=[0-9])\s*x\s*(?=10\^)", r"\\times "),
        (r"(?<=[0-9])\s*(?:\\text\{\s*percent\s*\}|percent\b)", "%"),
    )
]


@lru_cache(maxsize=8192)
def spell(text: str) -> str:
    r"""The same text in clean LaTeX: "x ≤ 2*sqrt(3)" -> "x \le 2*\sqrt{3}", "1\,000" -> "1000"."""
    text = _ENDING.sub("", text.strip()).translate(_SIGNS).strip()
    if (wrapped := _WRAPPED.fullmatch(text)) is not None:
        text = wrapped[1] or wrapped[2] or ""
    text = _GROUPED.sub(lambda number: _GROUP_MARK.sub("", number[0]), text)
    for pattern, meant in _SPELLINGS:
        text = pattern.sub(meant, text)
    return text.strip()


_SIZES = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|bigg?|Bigg?|quad|qquad)(?![A-Za-z])"
    r"|(?<!\\)\\[,;: ]|~"
)
_TEXT_UNIT = re.compile(
    r"(?:(?<=[0-9})])|(?<=\\pi))\s*\\(?:text|mathrm|mbox)\s*"
    r"\{\s*([A-Za-z./ ]*?(?:\^?[23])?)\s*\}(?:\^\{?[23]\}?)?$"
)
_UNIT_WORD = re.compile(
    r"(?<=[0-9])\s*(?:(?:square|cubic|sq\.?|cu\.?)\s+)?(?:dollars?|cents?|euros?|pounds?|rupees?|hours?"
    r"|minutes?|mins?|seconds?|secs?|days?|weeks?|months?|years?|degrees?|radians?|meters?|metres?"
    r"|kilometers?|kilometres?|centimeters?|centimetres?|millimeters?|inch|inches|foot|feet|yards?"
    r"|miles?|km|cm|mm|ft|kg|grams?|kilograms?|ounces?|liters?|litres?|gallons?|mph|units?|points?"
    r"|people|students?|apples?|ways?|times?"
    r"|(?:km|cm|m|mi|ft|miles?|meters?|feet)(?:\s*/\s*|\s+per\s+)(?:hour|hr|h|minute|min|second|sec|s)"
    r"(?:\^\{?2\}?)?)$",
    re.IGNORECASE,
)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_DEGREES = re.compile(
    r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree)\s*(?:[CF]|\\(?:text|mathrm)\s*\{\s*[CF]\s*\})?$"
)
_BLANKS = re.compile(r"\s+")
_IDLE_BLANK = re.compile(r"(?<![A-Za-z0-9.]) | (?![A-Za-z0-9.\\])")


@lru_cache(maxsize=8192)
def tidy(text: str) -> str:
    r"""The text that is compared: "$\dfrac{1}{2}\text{ cm}$." -> "\frac{1}{2}".

    It has no layout (sizes, spaces, dollars), no unit after a number, and no final stop.
    """
    text = _SIZES.sub(" ", spell(text)).replace("\\%", "%").replace("\\$", "").strip()
    unit = _TEXT_UNIT.search(text)
    if unit is not None and not changes_meaning(unit[1]):
        text = text[: unit.start()]
    text = _DEGREES.sub("", _TEXT.sub(r" \1 ", text).strip())
    text = _UNIT_WORD.sub("", text)
    return _IDLE_BLANK.sub("", _BLANKS.sub(" ", text)).strip()


def changes_meaning(words: str) -> bool:
    """False for a unit: "cm", "red apples"; True for "million" and "or more"."""
    return any(word in _MEANT or word.removesuffix("s") in SCALES for word in words.lower().split())
