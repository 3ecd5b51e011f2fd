r"""Whether an answer is an expression of the question, which has the right value before anything is done.

    What is 12 * 13?                "12*13", "13 \cdot 12", "(12)(13)"    repeated
                                    "12*13 + 0", "2*12*13/2"              it is contained in the answer
                                    "156", "100+56"                       not repeated
    Expand $(x+1)^2$.               "(x+1)^2", "(1 + x)**2"               repeated
    Which is larger, 3/4 or 2/3?    "\frac{3}{4}", gold 3/4              not repeated: it is the gold

Two expressions are the same if they have the same numbers, letters and signs, in any order; signs of
products may be left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from graft.rewards.maths.spelling import spell

_SIGN = r"[-+*/^!%]"
_COMMAND = r"\\[A-Za-z]+"
_TOKEN = re.compile(rf"[0-9]+(?:\.[0-9]+)?|(?P<operation>{_SIGN}|{_COMMAND})|[A-Za-z]")
_NO_MATHS = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}(?![A-Za-z])|[^-+*/^!%()\[\]{}\\0-9A-Za-z.\s]")
"""Words, and marks that end an expression, "=" among them."""
_SAME = {
    "*": "", r"\cdot": "", r"\times": "", r"\div": "/", r"\frac": "/", r"\left": "", r"\right": "",
}  # fmt: skip
_PROSE = re.compile(
    r"(?m)^\s*\(?\w\)\s|(?<=[A-Za-z])!|[.?](?=\s|$)|(?<=\s)-(?=\s*[A-Za-z]{2})|(?<=\s)[aAI](?=\s+[A-Za-z0-9])"
)
"""Marks and words of prose that could belong to an expression: "1)", stops, dashes, articles."""

_NEUTRAL = re.compile(r"[-+]\s*0(?![.0-9])|(?:\*|\\cdot|\\times|/)\s*1(?![.0-9])")
"""+ 0, * 1: what changes nothing."""


def repeats(
    answer: str,
    question: str,
    golds: Sequence[str],
    are_equal: Callable[[str, str], bool | None],
) -> bool:
    """True if `answer` is an expression in `question`, and not a gold as it is written."""
    answer = _NEUTRAL.sub("", answer)
    tokens = expression(answer.partition("=")[0] if answer.rstrip(" ?").endswith("=") else answer)
    if tokens is None or not question or any(expression(gold) == tokens for gold in golds):
        return False
    return any(
        found == tokens
        or (
            "=" not in answer
            and not any(token.isalpha() for token in found)
            and all(tokens[token] >= times for token, times in found.items() if token[0].isdigit())
            and any(are_equal(text, gold) for gold in golds)
        )
        for text, found in expressions(question)
    )


def expression(text: str) -> Counter[str] | None:
    """The numbers, letters and signs of a text; None for a single number or letter."""
    counted: Counter[str] = Counter()
    num_operands = num_signs = 0
    for found in _TOKEN.finditer(spell(text).replace("**", "^")):
        token = _SAME.get(found[0], found[0])
        is_sign = found["operation"] is not None
        num_signs += is_sign and not (token == "-" and not num_operands)
        num_operands += not is_sign
        if token:
            counted[token] += 1
    return counted if num_operands > 1 or (num_operands and num_signs) else None


def expressions(question: str) -> Iterator[tuple[str, Counter[str]]]:
    for part in _NO_MATHS.split(_PROSE.sub(" , ", spell(question))):
        found = expression(part)
        if found is not None:
            yield part.strip(), found
