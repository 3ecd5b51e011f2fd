"""A calculator that is safe for a policy's input: + - * / and parentheses, exact, bounded.

Python's parser builds the tree, which is walked and never executed. There are no powers, no names and
no calls, and length, depth and digits are limited, so every input is answered at once.

    work("12+34*5")  ->  value 182, numbers (12, 34, 5), steps 34*5=170, 12+170=182
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from graft.tools.errors import ERROR

MAX_LENGTH = 300  # characters
MAX_DEPTH = 100  # of the tree; a sum of 100 numbers is 100 deep
MAX_DIGITS = 100  # of any intermediate number, numerator or denominator

_TOO_LARGE = 10**MAX_DIGITS
_FOREIGN = re.compile(r"[^0-9.+\-*/() \t]")
_FLAT = re.compile(r"(?:0|[1-9][0-9]*)(?:[+\-*](?:0|[1-9][0-9]*)){0,50}")
_PARTS = re.compile(r"[0-9]+|[+\-*]")
_OPERATORS: dict[type[ast.operator], tuple[str, Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
}
_WHOLE: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


class CalculatorError(ValueError):
    """An expression without a value; the message is short enough for the policy."""


class CalculationStep(NamedTuple):
    """One operation of a calculation."""

    left: Fraction
    operator: str
    right: Fraction
    value: Fraction

    @property
    def text(self) -> str:
        """The operation as text: "34*5", "-22+5"."""
        return f"{format_number(self.left)}{self.operator}{format_number(self.right)}"


@dataclass(frozen=True, slots=True)
class Working:
    """An evaluated expression: its value, the numbers in it, the operations in order."""

    value: Fraction
    numbers: tuple[Fraction, ...]
    steps: tuple[CalculationStep, ...]


@lru_cache(maxsize=1024)  # the attempts at one task ask for the same ones
def work(expression: str) -> Working:
    """Evaluate an expression, operations of higher precedence first.

    >>> [step.text for step in work("12-34+5*2").steps]
    ['12-34', '5*2', '-22+10']
    """
    if len(expression) > MAX_LENGTH:
        raise CalculatorError(f"expression longer than {MAX_LENGTH} characters")
    text = expression.strip()
    if not text:
        raise CalculatorError("empty expression")
    if foreign := _FOREIGN.search(text):
        raise CalculatorError(f"unexpected character {foreign.group()!a}")
    if _FLAT.fullmatch(text):
        return _flat(text)
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        raise CalculatorError("not an arithmetic expression") from error
    numbers: list[Fraction] = []
    steps: list[CalculationStep] = []

    def value_of(node: ast.expr, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise CalculatorError(f"nested more than {MAX_DEPTH} deep")
        match node:
            case ast.Constant(value=int() | float()):
                # from the text, not from node.value: 0.1 is exactly one tenth
                number = bounded(Fraction(text[node.col_offset : node.end_col_offset]))
                numbers.append(number)
                return number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value_of(operand, depth + 1)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return value_of(operand, depth + 1)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                symbol, apply = _OPERATORS[type(op)]
                first, second = value_of(left, depth + 1), value_of(right, depth + 1)
                if symbol == "/" and second == 0:
                    raise CalculatorError("division by zero")
                result = bounded(apply(first, second))
                steps.append(CalculationStep(first, symbol, second, result))
                return result
            case ast.BinOp():
                raise CalculatorError("only + - * / are known")
            case _:
                raise CalculatorError("not an arithmetic expression")

    value = value_of(tree, 1)
    return Working(value, tuple(numbers), tuple(steps))


def _flat(text: str) -> Working:
    """`work` for whole numbers and + - *, which most calls are: without Python's parser, in half the time."""
    numbers: list[Fraction] = []
    steps: list[CalculationStep] = []
    values: list[Fraction] = []  # of operations that are still to come, with their
    symbols: list[str] = []
    for part in (*_PARTS.findall(text), ""):
        if part.isdigit():
            numbers.append(bounded(Fraction(int(part))))
            values.append(numbers[-1])
            continue
        while symbols and (symbols[-1] == "*" or part != "*"):
            symbol, second, first = symbols.pop(), values.pop(), values.pop()
            whole = _WHOLE[symbol](first.numerator, second.numerator)
            values.append(bounded(Fraction(whole)))
            steps.append(CalculationStep(first, symbol, second, values[-1]))
        symbols.append(part)
    return Working(values[0], tuple(numbers), tuple(steps))


def bounded(number: Fraction) -> Fraction:
    """`number` itself, or CalculatorError if it has too many digits."""
    if abs(number.numerator) >= _TOO_LARGE or number.denominator >= _TOO_LARGE:
        raise CalculatorError(f"number of more than {MAX_DIGITS} digits")
    return number


def evaluate(expression: str, *, max_operations: int | None = None) -> Fraction:
    """The exact value of an expression; CalculatorError if it has none.

    >>> evaluate("(12 + 6) / 4")
    Fraction(9, 2)
    """
    working = work(expression)
    count = len(working.steps)
    if max_operations is not None and count > max_operations:
        raise CalculatorError(f"{count} operations, at most {max_operations} in one call")
    return working.value


def format_number(number: Fraction) -> str:
    """Whole numbers plainly, others with three decimals: 170, 4.500, 0.333."""
    if number.denominator == 1:
        return str(number.numerator)
    return f"{float(number):.3f}"


def keys_of(expression: str) -> tuple[str, ...]:
    """The keys of an expression: "12 + 6" -> ("1", "2", "+", "6")."""
    return tuple("".join(expression.split()))


class Calculator:
    """The tool. "(12 + 6) / 3" -> "6"; "1/0" -> "Error: division by zero".

    `max_operations=1` makes it a pocket calculator: one operation per call, so that the policy has
    to know which comes first.
    """

    name = "calculator"
    description = "Works out an arithmetic expression with + - * / and parentheses."
    parameters = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "For example (12+6)/4."}},
        "required": ["expression"],
    }

    def __init__(self, max_operations: int | None = None) -> None:
        if max_operations is not None and max_operations < 1:
            raise ValueError(
                f"{max_operations=}: no call could be made; give 1 or more, None: no limit"
            )
        self.max_operations = max_operations

    def __call__(self, content: str) -> str:
        try:
            return format_number(evaluate(content, max_operations=self.max_operations))
        except CalculatorError as error:
            return f"{ERROR}{error}"
