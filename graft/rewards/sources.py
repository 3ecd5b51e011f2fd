"""Grading rules by `data_source`, as the systems that published the rows grade them.

calc_bench    {"task": "countdown", "expr": "(1 + 2) / 3"}, gold 1      "#### (1 + 2) / 3"  ->  1.0
                                                                        "#### 1"            ->  0.0
countdown     {"nums": [3, 1, 2], "target": "1"}                        "<answer> (1 + 2) / 3 </answer>"

All of them are EARL's, whose rows hold more than the gold. A row of such a source without these fields
comes from elsewhere, and the rule does not apply to it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from graft.rewards.answers import value_of
from graft.rewards.numbers import parse_number, same_number
from graft.text.parse import first_answer, first_marked, last_number, marked_number

Grader = Callable[[str, Any, Mapping[str, Any]], float | None]
"""(the policy's text, the gold, the row's meta) -> the reward; None: the row has another form."""

NUMERIC = ("arithmetic", "gsm8kr", "modulo", "repeat", "count", "big_math")
"""Tasks of CalcBench whose answer is one number after ####."""
NEAR = Fraction(1, 100_000)
"""How far from the target an expression may be: targets are written with three decimals."""
MAX_BOARD = 4_000  # characters of a sudoku


def grade_by_source(source: str, text: str, answer: Any, meta: Mapping[str, Any]) -> float | None:
    """The reward by the rule of the source; None if the source has no rule or the row another form.

    >>> grade_by_source("calc_bench", "#### 1", "1", {"task": "countdown", "expr": "(1 + 2) / 3"})
    0.0
    """
    grader = SOURCES.get(source)
    return None if grader is None else grader(text, answer, meta)


def last_number_counts(text: str, answer: Any, meta: Mapping[str, Any]) -> float:
    """1.0 if the last number in the text is the answer."""
    return float(same_number(last_number(text) or "", str(answer)))


def calc_bench(text: str, answer: Any, meta: Mapping[str, Any]) -> float | None:
    """Grade by `task`: a number, an expression or a board after ####."""
    match meta.get("task"):
        case str(task) if task in NUMERIC:
            return float(same_number(marked_number(text) or "", str(answer)))
        case "approximate":
            given, right = parse_number(marked_number(text) or ""), parse_number(str(answer))
            if right is None:
                return None
            return 0.0 if given is None else float(max(Fraction(0), 1 - abs(given - right)))
        case "countdown":
            numbers = re.findall(r"\d+", str(meta.get("expr", "")))
            target = parse_number(str(answer))
            if not numbers or target is None:
                return None
            return _solves(first_marked(text), [int(one) for one in numbers], target)
        case "sudoku":
            board = _board(str(answer))
            found = re.search(r"####\s*(\[[\s\S]*\])", text)  # up to the last ]
            return None if board is None else float(_board(found[1] if found else "") == board)
        case _:
            return None


def countdown(text: str, answer: Any, meta: Mapping[str, Any]) -> float | None:
    """An expression in the first <answer>; the numbers are in the meta, or in a gold "[1, 2]->3"."""
    numbers, target = meta.get("nums"), meta.get("target")
    if isinstance(answer, str) and (numbers is None or target is None):
        given, arrow, target = answer.partition("->")
        numbers = re.findall(r"\d+", given) if arrow else None
    goal = parse_number(str(target))
    if not isinstance(numbers, list) or not numbers or goal is None:
        return None
    return _solves(first_answer(text), [int(one) for one in numbers], goal)


SOURCES: dict[str, Grader] = {
    "basic_calculator_tutorial": last_number_counts,
    "big_math": calc_bench,
    "calc_bench": calc_bench,
    "countdown": countdown,
    "countdown3to4": countdown,
}
"""`data_source` of a row -> its grading rule."""


def _solves(expression: str | None, numbers: Sequence[int], target: Fraction) -> float:
    """1.0 if the expression uses exactly these numbers and its value is the target."""
    value = value_of(expression or "", numbers)
    return float(value is not None and abs(value - target) < NEAR)


def _board(text: str) -> Any:
    """A list of lists as Python writes it; None for any other text."""
    if not text.startswith("[") or len(text) > MAX_BOARD:
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
