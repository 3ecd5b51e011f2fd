"""The syntax of a calculator: digits, + - * /, parentheses, a point; an exit after a value.

    12 + (3 ...     after "3", a number inside one parenthesis:
                    digits continue it, + - * / and ")" follow it, an exit is allowed only after ")"

A state is the kind of the last symbol and the number of open "(". There are two tables of what may
follow. `STRICT` is EARL's: no number 0, no sign, and a number may have two points (its tool then answers
with an error). `COMPLETE` has usual numbers: 0, 0.5, -3 at the start or after "(", one point.
"""

from __future__ import annotations

from collections.abc import Sequence

from graft.actions.rules import Symbol, SyntaxMove, SyntaxRules

KINDS = {
    "0": "zero",
    **dict.fromkeys("123456789", "digit"),
    **dict.fromkeys("+*/", "operator"),
    "-": "minus",
    "(": "open",
    ")": "close",
    ".": "point",
    "": "blank",
}
"""Text of a symbol -> its kind; the symbols of an exit group are "exit", whatever their text."""

Table = dict[str, dict[str, str]]
"""Kind of the last symbol -> {kind that may follow: the kind that it becomes}."""

BINARY = {"operator": "operator", "minus": "operator"}
VALUE = {**BINARY, "close": "closed", "exit": ""}
"""Kinds that follow a complete value."""

STRICT: Table = {
    "start": {"digit": "number", "open": "operator"},
    "operator": {"digit": "number", "open": "operator", "blank": "operator"},  # or after "("
    "number": {**VALUE, "zero": "number", "digit": "number", "point": "point", "blank": "number"},
    "closed": {**VALUE, "blank": "closed"},
    "point": {"zero": "number", "digit": "number", "close": "closed", "blank": "point"},
}

OPERAND = {"zero": "zero", "digit": "number", "open": "start"}
COMPLETE: Table = {
    "start": {**OPERAND, "minus": "operator", "blank": "start"},  # or after "("
    "operator": {**OPERAND, "blank": "operator"},
    "zero": {**VALUE, "point": "point", "blank": "closed"},
    "number": {**VALUE, "zero": "number", "digit": "number", "point": "point", "blank": "closed"},
    "point": {"zero": "fraction", "digit": "fraction"},
    "fraction": {**VALUE, "zero": "fraction", "digit": "fraction", "blank": "closed"},
    "closed": {**VALUE, "blank": "closed"},
}


def expression(symbols: Sequence[Symbol], depth: int = 8, complete: bool = False) -> SyntaxRules:
    """Arithmetic with at most `depth` open parentheses; then "(" is no longer allowed."""
    if depth < 0:
        raise ValueError(f"depth={depth}: must be 0 or more")
    for symbol in symbols:
        if not symbol.is_exit and symbol.text not in KINDS:
            raise ValueError(
                f"{symbol.text!r} is no part of an expression; it has digits, + - * / ( ) . and "
                f"blanks, and exits in a group named 'exit'"
            )
    table = COMPLETE if complete else STRICT

    def move(state: tuple[str, int], symbol: Symbol) -> SyntaxMove | None:
        before, is_open = state
        kind = "exit" if symbol.is_exit else KINDS[symbol.text]
        after = table[before].get(kind)
        if after is None:
            return None
        if kind == "exit":
            return None if is_open else SyntaxMove(None)
        if kind == "open":
            return SyntaxMove((after, is_open + 1)) if is_open < depth else None
        if kind == "close":
            return SyntaxMove((after, is_open - 1)) if is_open else None
        return SyntaxMove((after, is_open))

    return SyntaxRules(("start", 0), move)
