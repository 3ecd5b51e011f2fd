"""The nouns of a syntax: a symbol, what it does in a state, and the rules that say so."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple


class Symbol(NamedTuple):
    """An action as a syntax sees it: what it says without blanks around, and its group."""

    text: str
    group: str
    is_exit: bool = False


class SyntaxMove(NamedTuple):
    """An allowed symbol leads to `state` (None: the call is complete) and may write more text."""

    state: Hashable
    insert: str = ""


class SyntaxRules(NamedTuple):
    """A first state, and (state, symbol) -> Move, or None where the symbol is not allowed."""

    start: Hashable
    move: Callable[[Any, Symbol], SyntaxMove | None]
