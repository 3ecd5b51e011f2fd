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
from itertools import pairwise
from typing import Any

from graft.config import ConfigError
from graft.spelling import nearest
from graft.types import Status

Attempt = Mapping[str, Any]
"""The outcome of an attempt, by name; see `graft.rollout.recorded.outcome_of`."""
Condition = Callable[[Attempt], bool]

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
    how = f'write it like "reward > 0 and tool_calls >= 1", with {", ".join(NAMES)}'
    try:
        if len(text) > LONGEST:
            raise ValueError(f"it has {len(text)} characters, and {LONGEST} are allowed")
        tree = ast.parse(text.strip(), mode="eval").body
        # every part is evaluated, so one attempt of any kind finds all that is wrong
        _holds(tree, dict.fromkeys(NUMBERS, 0) | {"status": Status.DONE})
    except SyntaxError as error:
        raise ConfigError(
            f"--keep {text!r} cannot be parsed near character {error.offset}; {how}"
        ) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"--keep {text[:LONGEST]!r}: {error}; {how}") from error
    return lambda attempt: _holds(tree, attempt)


def _holds(node: ast.expr, attempt: Attempt) -> bool:
    match node:
        case ast.BoolOp(op=op, values=values):
            parts = [_holds(value, attempt) for value in values]
            return all(parts) if isinstance(op, ast.And) else any(parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _holds(operand, attempt)
        case ast.Compare(left=left, ops=signs, comparators=others):  # 0 < reward <= 1 is two
            sides = [_value(side, attempt) for side in (left, *others)]
            pairs = zip(signs, pairwise(sides), strict=True)
            parts = [_compare(node, sign, *pair) for sign, pair in pairs]
            return all(parts)
        case ast.Name(id=name) if name in NUMBERS:
            raise ValueError(f"{name} is not compared with anything; write {name} > 0")
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not a condition")


def _compare(node: ast.Compare, sign: ast.cmpop, left: Any, right: Any) -> bool:
    compare = COMPARISONS.get(type(sign))
    if compare is None:
        raise ValueError(f"{ast.unparse(node)!r}: use one of > >= < <= == !=")
    if isinstance(left, str) != isinstance(right, str):
        raise ValueError(f"{ast.unparse(node)!r} compares a number with a text")
    if isinstance(left, str) and not isinstance(sign, ast.Eq | ast.NotEq):
        raise ValueError(f"{ast.unparse(node)!r}: a status is compared with == or !=")
    return compare(left, right)


def _value(node: ast.expr, attempt: Attempt) -> float | str:
    """One side of a comparison."""
    match node:
        case ast.Constant(value=bool()):
            raise ValueError(f"{node.value} is neither a number nor a status")
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id=name) if name in NAMES:
            return attempt[name]
        case ast.Name(id=text) | ast.Constant(value=str() as text):
            known = [str(status) for status in Status]
            if text not in known:
                hint = nearest(text, [*NAMES, *known])
                meant = f"; did you mean {hint!r}?" if hint else ""
                raise ValueError(f"unknown name {text!r}{meant}")
            return text
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is neither a name nor a number")
