"""The types of a syntax: a symbol, a move between states, and the rules."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple


class Symbol(NamedTuple):
    """An action for a syntax: its text without surrounding blanks, and its group."""

    text: str
    group: str
    is_exit: bool = False


class SyntaxMove(NamedTuple):
    """An allowed symbol leads to `state` (None: the call is complete) and may write more text."""

    state: Hashable
    insert: str = ""


class SyntaxRules(NamedTuple):
    """A first state, and (state, symbol) -> SyntaxMove, or None if the symbol is not allowed."""

    start: Hashable
    move: Callable[[Any, Symbol], SyntaxMove | None]
