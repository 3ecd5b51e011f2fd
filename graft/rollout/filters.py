"""Which attempts to keep: a condition on the outcome of each.

    reward > 0
    reward == 1 and tool_calls >= 2
    not (status == truncated or length > 400)

Names are reward, turns, tool_calls, length (tokens that the policy sampled) and status; a status is
written as a bare word or in quotes. Comparisons, and, or, not and parentheses are allowed, and nothing
else: a condition is parsed into a tree of these and never executed as Python.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from graft.config import ConfigError
from graft.registry import nearest
from graft.types import Status

Attempt = Mapping[str, Any]
"""The outcome of an attempt, by name; see `graft.rollout.recorded.outcome_of`."""
Condition = Callable[[Attempt], bool]
Value = Callable[[Attempt], Any]

NUMBERS = ("reward", "turns", "tool_calls", "length")
NAMES = (*NUMBERS, "status")
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
LONGEST = 500


def read_condition(text: str) -> Condition:
    """
    >>> read_condition("reward>0 and turns<=2")({"reward": 1.0, "turns": 3})
    False
    """
    try:
        if len(text) > LONGEST:
            raise ValueError(f"it has {len(text)} characters, and {LONGEST} are allowed")
        return _condition(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ConfigError(
            f"--keep {text!r} cannot be parsed near character {error.offset}; {_HOW}"
        ) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"--keep {text[:LONGEST]!r}: {error}; {_HOW}") from error


_HOW = f'write it like "reward > 0 and tool_calls >= 1", with {", ".join(NAMES)}'


def _condition(node: ast.expr) -> Condition:
    match node:
        case ast.BoolOp(op=ast.And(), values=values):
            every = [_condition(value) for value in values]
            return lambda attempt: all(one(attempt) for one in every)
        case ast.BoolOp(values=values):
            some = [_condition(value) for value in values]
            return lambda attempt: any(one(attempt) for one in some)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _condition(operand)
            return lambda attempt: not inner(attempt)
        case ast.Compare():
            return _comparison(node)
        case ast.Name(id=name) if name in NUMBERS:
            raise ValueError(f"{name} is not compared with anything; write {name} > 0")
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not a condition")


def _comparison(node: ast.Compare) -> Condition:
    """`0 < reward <= 1` is two comparisons."""
    sides = [_value(side) for side in (node.left, *node.comparators)]
    pairs: list[tuple[Callable[[Any, Any], bool], Value, Value]] = []
    for number, sign in enumerate(node.ops):
        (left, left_is_text), (right, right_is_text) = sides[number : number + 2]
        compare = COMPARISONS.get(type(sign))
        if compare is None:
            raise ValueError(f"{ast.unparse(node)!r}: use one of > >= < <= == !=")
        if left_is_text != right_is_text:
            raise ValueError(f"{ast.unparse(node)!r} compares a number with a text")
        if left_is_text and not isinstance(sign, ast.Eq | ast.NotEq):
            raise ValueError(f"{ast.unparse(node)!r}: a status is compared with == or !=")
        pairs.append((compare, left, right))
    return lambda attempt: all(
        compare(left(attempt), right(attempt)) for compare, left, right in pairs
    )


def _value(node: ast.expr) -> tuple[Value, bool]:
    """One side of a comparison, and whether it is a text."""
    match node:
        case ast.Constant(value=bool()):
            raise ValueError(f"{node.value} is neither a number nor a status")
        case ast.Constant(value=int() | float() as number):
            return (lambda attempt: number), False
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return (lambda attempt: -number), False
        case ast.Name(id=name) if name in NAMES:
            return (lambda attempt: attempt[name]), name == "status"
        case ast.Name(id=word) | ast.Constant(value=str() as word):
            known = [str(status) for status in Status]
            if word not in known:
                hint = nearest(word, [*NAMES, *known])
                meant = f"; did you mean {hint!r}?" if hint else ""
                raise ValueError(f"unknown name {word!r}{meant}")
            return (lambda attempt: word), True
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is neither a name nor a number")
