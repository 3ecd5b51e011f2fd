"""A syntax: which of a tool's actions may come next, and which one completes the call.

It is a function from the tool's symbols (and options) to `SyntaxRules`: a first state, and the move of a
symbol in a state. `explore` enumerates the reachable states; these become modes.

    arguments(symbols, take=["items", "items"], between=" and", distinct=True)    items A, B
        state 0   A -> 1 (writes " and" too)    B -> 2 (writes " and" too)
        state 1   B completes the call
        state 2   A completes the call

Your own, in an action file as "your.module:pairs" or {your.module:pairs: {limit: 2}}:

    def pairs(symbols, limit=3):
        def move(count, symbol):            # any symbol, `limit` times
            return SyntaxMove(count + 1) if count + 1 < limit else SyntaxMove(None)
        return SyntaxRules(0, move)

The number of states must be finite; a state is any hashable value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from graft.actions.expression import expression
from graft.actions.fields import ActionsError
from graft.actions.rules import Symbol, SyntaxMove, SyntaxRules
from graft.registry import resolve

__all__ = ["SYNTAXES", "Symbol", "SyntaxMove", "SyntaxRules", "arguments", "explore", "rules_of"]

MAX_STATES = 2000
"""Each is a row as wide as the vocabulary; more usually means that the syntax has no bound."""


def arguments(
    symbols: Sequence[Symbol], take: Sequence[str], between: str = "", distinct: bool = False
) -> SyntaxRules:
    """One symbol of each group in `take`, in this order; the last completes the call.

    `between` is written after every argument but the last. `distinct`: none may occur twice.
    """
    groups = list(dict.fromkeys(symbol.group for symbol in symbols))
    for name in take:
        if name not in groups:
            raise ValueError(f"take has {name!r}; the groups of this tool are {groups}")
    if not take:
        raise ValueError("take is empty; name the group of each argument")

    def move(taken: tuple[Symbol | None, ...], symbol: Symbol) -> SyntaxMove | None:
        if symbol.group != take[len(taken)] or symbol in taken:
            return None
        if len(taken) + 1 == len(take):
            return SyntaxMove(None)
        # a symbol that cannot be forbidden later need not be kept
        is_kept = distinct and symbol.group in take[len(taken) + 1 :]
        return SyntaxMove((*taken, symbol if is_kept else None), between)

    return SyntaxRules((), move)


Syntax = Callable[..., SyntaxRules]
SYNTAXES: dict[str, Syntax] = {"expression": expression, "arguments": arguments}
"""Name -> a function of a tool's symbols and the options of its file."""


KINDS: dict[type, str] = {
    bool: "true or false, without quotation marks",
    int: "a whole number, without quotation marks",
    str: "a text, in quotation marks",
}


def rules_of(
    name: str, symbols: Sequence[Symbol], options: dict[str, Any], where: str
) -> SyntaxRules:
    """The rules of the syntax called `name`."""
    try:
        syntax: Syntax = resolve(name, SYNTAXES, "syntax")
        signature = inspect.signature(syntax)
        signature.bind(symbols, **options)
        if name in SYNTAXES:
            _check_kinds(signature, options)
        rules: Any = syntax(symbols, **options)
    except (TypeError, ValueError) as error:
        raise ActionsError(f"{where}, syntax {name!r}: {error}") from error
    if not isinstance(rules, SyntaxRules):
        raise ActionsError(
            f"{where}, syntax {name!r}: it returned {rules!r}; return SyntaxRules(first state, move) of "
            f"graft.actions.syntax"
        )
    return rules


def _check_kinds(signature: inspect.Signature, options: dict[str, Any]) -> None:
    """Raise if an option is not of the kind of its default: "no" in quotation marks would be true."""
    for key, value in options.items():
        default: object = signature.parameters[key].default
        kind = type(default)
        if kind in KINDS and type(value) is not kind:
            raise ValueError(f"{key}={value!r}: must be {KINDS[kind]}")


class Arc(NamedTuple):
    """One allowed symbol: the number of the state it leads to, None where the call is complete."""

    state: int | None
    insert: str


def explore(rules: SyntaxRules, symbols: Sequence[Symbol], where: str) -> list[dict[int, Arc]]:
    """The arcs of each reachable state: {number of the symbol: Arc}; state 0 is the first."""
    numbers: dict[Hashable, int] = {rules.start: 0}
    queue: list[Hashable] = [rules.start]
    states: list[dict[int, Arc]] = []
    for state in queue:  # grows as states are found
        arcs: dict[int, Arc] = {}
        for i, symbol in enumerate(symbols):
            move = rules.move(state, symbol)
            if move is None:
                continue
            if move.state is not None and move.state not in numbers:
                numbers[move.state] = len(queue)
                queue.append(move.state)
            arcs[i] = Arc(None if move.state is None else numbers[move.state], move.insert)
        states.append(arcs)
        if len(queue) > MAX_STATES:
            raise ActionsError(
                f"{where}: the syntax has more than {MAX_STATES} states; bound its states"
            )
    unused = set(range(len(symbols))).difference(*states)
    if unused:
        raise ActionsError(
            f"{where}: the syntax never allows {symbols[min(unused)].text!r}; take it out of the "
            f"tool's groups, or use another syntax"
        )
    return states


def refuse_traps(states: Sequence[dict[int, Arc]], symbols: Sequence[Symbol], where: str) -> None:
    """Raise if a call can reach a state from which it cannot be completed."""
    ways_out = {
        i for i, arcs in enumerate(states) if any(arc.state is None for arc in arcs.values())
    }
    while more := {
        i
        for i, arcs in enumerate(states)
        if i not in ways_out and any(arc.state in ways_out for arc in arcs.values())
    }:
        ways_out |= more
    if 0 not in ways_out:
        raise ActionsError(
            f"{where}: no call can ever be completed; the tool needs a group 'exit', or a syntax "
            f"whose last argument completes the call"
        )
    for arcs in states:
        for i, arc in arcs.items():
            if arc.state is not None and arc.state not in ways_out:
                raise ActionsError(
                    f"{where}: after {symbols[i].text!r} a call can never be completed; an action "
                    f"is missing in the tool's groups, or the syntax has a gap"
                )
