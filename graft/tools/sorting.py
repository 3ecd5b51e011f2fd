"""Compare, swap and check: the tools for items whose values are hidden behind symbols.

    A, B, C hide 2, 0, 1
    compare A, B  ->  "A > B"        the order does not change
    swap A, B     ->  "B, A, C"      the new order
    check B, even ->  "True"

Each is a pure function from a state and two arguments to the next state and the observation. The
syntaxes below write calls in tags, in words or by actions beyond the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from graft.tools.errors import ERROR
from graft.types import CallText

SYMBOLS = "ABCDE"
MAX_ECHO = 20  # characters of a symbol that an answer repeats

PROPERTIES: dict[str, Callable[[int], bool]] = {
    "negative": lambda value: value < 0,
    "positive": lambda value: value > 0,
    "even": lambda value: value % 2 == 0,
    "odd": lambda value: value % 2 == 1,
}


class Hidden(NamedTuple):
    """Items and their order. Symbol number i ("A" is 0) hides `values[i]` at any position."""

    values: tuple[int, ...]
    order: tuple[str, ...]
    symbols: tuple[str, ...] = tuple(SYMBOLS)

    @property
    def value_of(self) -> dict[str, int]:
        return dict(zip(self.symbols, self.values, strict=False))

    def undefined(self, *symbols: str) -> list[str]:
        """The unknown symbols, each once and shortened."""
        unknown = [symbol[:MAX_ECHO] for symbol in symbols if symbol not in self.order]
        return list(dict.fromkeys(unknown))


Result = tuple[Hidden, str]


def apply_compare(state: Hidden, a: str, b: str) -> Result:
    """ "A < B", "A > B", or "A = B" for a symbol and itself."""
    if unknown := state.undefined(a, b):
        return state, f"Cannot compare due to undefined symbols {', '.join(unknown)}."
    left, right = state.value_of[a], state.value_of[b]
    sign = "<" if left < right else ">" if left > right else "="
    return state, f"{a} {sign} {b}"


def apply_swap(state: Hidden, a: str, b: str) -> Result:
    """The order after two items have changed places; an undefined or equal pair changes nothing."""
    if a in state.order and b in state.order:
        trade = {a: b, b: a}
        state = state._replace(order=tuple(trade.get(symbol, symbol) for symbol in state.order))
    return state, ", ".join(state.order)


def apply_check(state: Hidden, symbol: str, quality: str) -> Result:
    """ "True" or "False": is the hidden value negative, positive, even, odd?"""
    if unknown := state.undefined(symbol):
        return state, f"Cannot check due to undefined symbol {unknown[0]}."
    name = quality.removeprefix("is ").strip()
    if name not in PROPERTIES:
        return state, f"{ERROR}known properties are {', '.join(PROPERTIES)}"
    return state, str(PROPERTIES[name](state.value_of[symbol]))


TRANSITIONS: dict[str, Callable[[Hidden, str, str], Result]] = {
    "compare": apply_compare,
    "swap": apply_swap,
    "check": apply_check,
}


class SortingCall(NamedTuple):
    tool: str
    arguments: tuple[str, str] | None
    """None: the call has not exactly two."""


class SortingSyntax(NamedTuple):
    """How calls are written, parsed and answered. "{0}" and "{1}" are arguments, "{}" the result."""

    call: dict[str, str]
    result: dict[str, str]
    gap: str
    """The text between a result and the next call in demonstrations."""
    find: Callable[[str, tuple[str, ...]], SortingCall | None]
    """(text, tools) -> the call to one of these tools at the end of the text; None without one."""
    stops: Callable[[tuple[str, ...]], tuple[str, ...]]
    """tools -> the strings that end a turn because a call is complete."""
    is_bare: bool = False
    """Whether the tools answer with only the result, because the actions write the rest."""

    def write(self, tool: str, a: str, b: str, lead: str = "") -> CallText:
        """The call as a `CallText`, which the syntax "actions" requires."""
        second = f"is {b}" if self.is_bare and tool == "check" else b  # one action for both words
        return CallText(f"{lead}{self.call[tool].format(a, b)}", tool, (a, second))

    def render(self, tool: str, result: str) -> str:
        return result if self.is_bare else self.result.get(tool, "{}").replace("{}", result)

    def example(self, tool: str, a: str, b: str, result: str) -> str:
        """ "compare A and B: A > B": a call and its answer, as the prompt explains them."""
        return self.write(tool, a, b).strip() + self.result[tool].replace("{}", result).rstrip()


def find_in_tags(text: str, tools: tuple[str, ...]) -> SortingCall | None:
    """ "so <swap> A, B </swap>" -> swap, A and B.

    A closing tag makes it a call; without an opening tag before it, or without exactly two arguments
    between them, its `arguments` are None.
    """
    text = text.rstrip()
    for tool in tools:
        if text.endswith(f"</{tool}>"):
            _, opened, content = text.removesuffix(f"</{tool}>").rpartition(f"<{tool}>")
            parts = content.split(",", 2) if opened else []
            both = (parts[0].strip(), parts[1].strip()) if len(parts) == 2 else None
            return SortingCall(tool, both)
    return None


def find_in_words(text: str, tools: tuple[str, ...]) -> SortingCall | None:
    """ "Now compare A and B" -> compare, A and B."""
    found = _IN_WORDS.search(text.rstrip()[-_LONGEST:])
    if found is None:
        return None
    tool, a, b = found.groups()[:3] if found[1] else found.groups()[3:]
    return SortingCall(tool, (a, b)) if tool in tools else None


_LONGEST = 40  # characters; a call in words is shorter
_IN_WORDS = re.compile(
    r"\b(?:(compare|swap) ([A-Z]) and ([A-Z])|(check) if ([A-Z]) is ([a-z]{1,9}))\Z"
)


def find_made(text: str, tools: tuple[str, ...]) -> SortingCall | None:
    """The call of a `CallText`, also to a tool that is not among `tools`: it needs an answer."""
    if not isinstance(text, CallText):
        return None
    both = (text.arguments[0], text.arguments[1]) if len(text.arguments) == 2 else None
    return SortingCall(text.tool, both)


# functions, not lambdas: environments are pickled with their syntax
def closing_tags(tools: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"</{tool}>" for tool in tools)


def no_stops(tools: tuple[str, ...]) -> tuple[str, ...]:
    return ()


def every_call(tools: tuple[str, ...]) -> tuple[str, ...]:
    """ "swap A and A", "swap A and B", ...: without tags only the complete call marks its end."""
    return tuple(
        _IN_A_SENTENCE[tool].format(a, b)
        for tool in tools
        for a in SYMBOLS
        for b in (PROPERTIES if tool == "check" else SYMBOLS)
    )


_AFTER_WORDS = {"compare": ": {}\n", "swap": " => {}\n", "check": ": {}\n"}
_IN_A_SENTENCE = {
    "compare": "compare {0} and {1}",
    "swap": "swap {0} and {1}",
    "check": "check if {0} is {1}",
}

TAGS = SortingSyntax(
    call={tool: f"<{tool}> {{0}}, {{1}} </{tool}>" for tool in TRANSITIONS},
    result=dict.fromkeys(TRANSITIONS, " <result> {} </result>"),
    gap="\n",
    find=find_in_tags,
    stops=closing_tags,
)
WORDS = SortingSyntax(
    call=_IN_A_SENTENCE, result=_AFTER_WORDS, gap="", find=find_in_words, stops=every_call
)
ACTIONS = SortingSyntax(
    call={tool: f" {words}" for tool, words in _IN_A_SENTENCE.items()},
    result=_AFTER_WORDS,
    gap="",
    find=find_made,
    stops=no_stops,
    is_bare=True,
)
SYNTAXES = {"tags": TAGS, "words": WORDS, "actions": ACTIONS}


def carry_out(state: Hidden, call: SortingCall) -> Result:
    """The answer to any call, also one without two arguments; the state after it."""
    if call.arguments is None:
        return state, f"{ERROR}{call.tool} takes two arguments, A, B"
    return TRANSITIONS[call.tool](state, *call.arguments)


def is_carried_out(state: Hidden, call: SortingCall) -> bool:
    """False for a call with wrong arguments or undefined symbols, which does nothing."""
    if call.arguments is None:
        return False
    a, b = call.arguments
    if call.tool == "check":
        return not state.undefined(a) and b.removeprefix("is ").strip() in PROPERTIES
    return not state.undefined(a, b) and not (call.tool == "swap" and a == b)
