r"""The value of a short formula, in microseconds and without a computer-algebra system.

    \frac{3}{4} - 1           Fraction(-1, 4)
    2\sqrt{3}                 Ball(3.4641..., 1e-15): the value and its error
    x^2 + 2x                  its values at three fixed points

The grammar has numbers, + - * / ^, \frac, \sqrt, \pi, parentheses and one-letter variables, without
ambiguous forms: after "6/2" a "(1+2)" may belong to either side, "2 3" may be a product or a mixed
number, "f(x)" may be a call. Such texts raise `Unreadable`, and math-verify reads them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from graft.rewards.maths import ball_arithmetic as ball
from graft.rewards.maths.ball_arithmetic import Ball, Unreadable, Value

MAX_DEPTH = 12  # of nesting

_TOKEN = re.compile(
    r"(?P<number>[0-9]+\.[0-9]+|\.[0-9]+|[0-9]+)|\\(?P<command>[A-Za-z]+)"
    r"|(?P<letters>[A-Za-z]+)|(?P<symbol>[-+*/^(){}\[\]])|(?P<blank>\s+)",
    re.ASCII,
)
_FUSED_FRACTION = re.compile(r"\\frac\s*([0-9])\s*([0-9]|(?=\{))")  # \frac12, \frac1{23}
_LISTED = "or to in if no ln lg pi is of at on cm mm km ft kg mg ml lb oz hr am pm yd mi"
_NAMES = frozenset(_LISTED.split())
"""Two letters that are a word or a unit, and not a product."""
_CONSTANTS = frozenset("eiEI")  # may be a variable, or not


class Formula(NamedTuple):
    """`values` has one entry, or one per point of `POINTS` if there are variables."""

    values: tuple[Value, ...]
    has_decimals: bool

    @property
    def is_number(self) -> bool:
        return len(self.values) == 1


def letter_values(point: int) -> dict[str, Fraction]:
    """A positive number for every letter; upper and lower case are the same letter."""
    values = {}
    for number, letter in enumerate("abcdfghjklmnopqrstuvwxyz"):
        value = Fraction(37 * number + 11 * point + 41, 29 + 2 * point)
        values[letter] = values[letter.upper()] = value
    return values


POINTS = tuple(letter_values(point) for point in range(3))


def read_formula(text: str) -> Formula:
    """The values of a formula, or Unreadable."""
    parser = _Parser(text)
    if not parser.letters:
        return Formula((parser.value({}),), parser.has_decimals)
    return Formula(tuple(parser.value(point) for point in POINTS), parser.has_decimals)


class _Token(NamedTuple):
    kind: str
    text: str


class _Parser:
    """Recursive descent; `value` may be called for several points."""

    def __init__(self, text: str) -> None:
        text = _FUSED_FRACTION.sub(r"\\frac{\1}{\2}", text).replace("{}{", "{")
        self.tokens: list[_Token] = []
        self.letters: set[str] = set()
        at, blank = 0, False
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise Unreadable(f"unknown character {text[at]!r}")
            at, kind = found.end(), str(found.lastgroup)
            if kind == "letters":
                self._add_letters(found[0], blank)
            elif kind != "blank":
                self.tokens.append(_Token(kind, found[kind]))
            blank = kind == "blank"
        self.has_decimals = any(t.kind == "number" and "." in t.text for t in self.tokens)

    def _add_letters(self, run: str, blank: bool) -> None:
        if len(run) > 2 or run.lower() in _NAMES or _CONSTANTS & set(run):
            raise Unreadable(f"{run!r} may be a word")
        if blank and self.tokens and self.tokens[-1].kind == "number":
            raise Unreadable(f"{run!r} may be a unit")
        self.letters |= set(run)
        for letter in run:
            self.tokens.append(_Token("letter", letter))

    def value(self, variables: Mapping[str, Fraction]) -> Value:
        self.variables = variables
        self.at = self.depth = 0
        result = self._sum()
        if self.at < len(self.tokens):
            raise Unreadable("text after the formula")
        return result

    def _peek(self) -> tuple[str, str]:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("", "")

    def _take(self, symbol: str) -> bool:
        if self._peek() == ("symbol", symbol):
            self.at += 1
            return True
        return False

    def _expect(self, symbol: str) -> None:
        if not self._take(symbol):
            raise Unreadable(f"no {symbol!r}")

    def _sum(self) -> Value:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("too deep")
        is_negative = self._take("-") or (self._take("+") and False)
        total = ball.negate(self._product()) if is_negative else self._product()
        while self._peek() in (("symbol", "+"), ("symbol", "-")):
            is_negative = self._take("-") or not self._take("+")
            term = self._product()
            total = ball.add(total, ball.negate(term) if is_negative else term)
        self.depth -= 1
        return total

    def _product(self) -> Value:
        start = self.at
        total = self._mixed_number()
        if total is not None:
            if self._starts_factor() or self._peek() in (("symbol", "*"), ("symbol", "/")):
                raise Unreadable("a factor after a mixed number")
            return total
        self.at = start
        total = self._factor()
        has_divided = False
        while True:
            kind, text = self._peek()
            if self._take("*") or (kind == "command" and text in ("cdot", "times")):
                self.at += kind == "command"
                total = ball.multiply(total, self._factor())
            elif self._take("/"):
                total = ball.divide(total, self._factor())
                has_divided = True
            elif self._starts_factor():
                if has_divided or kind == "number" or self._looks_mixed(self.at - 1):
                    raise Unreadable("a factor without a sign")
                total = ball.multiply(total, self._factor())
            else:
                return total

    def _mixed_number(self) -> Value | None:
        r"""1\frac{1}{2} is 3/2; None if this is something else, which is then parsed again."""
        if not self._looks_mixed(self.at):
            return None
        here = self.tokens[self.at : self.at + 8]
        if any(token.kind == "number" and "." in token.text for token in here):
            raise Unreadable("decimals in a mixed number")
        whole, top, bottom = (int(here[n].text[:400]) for n in (0, 3, 6))
        if not 0 < top < bottom:
            raise Unreadable("not a proper fraction")
        self.at += 8
        if self._peek() == ("symbol", "^"):
            raise Unreadable("a power of a mixed number")
        return ball.exact(whole + Fraction(top, bottom))

    def _looks_mixed(self, at: int) -> bool:
        shape = ["1" if t.kind == "number" else t.text for t in self.tokens[at : at + 8]]
        return shape == ["1", "frac", "{", "1", "}", "{", "1", "}"]

    def _starts_factor(self) -> bool:
        kind, text = self._peek()
        if kind == "symbol":
            return text == "("
        return kind in ("number", "letter") or (kind == "command" and text not in ("cdot", "times"))

    def _factor(self) -> Value:
        base = self._atom()
        if not self._take("^"):
            return base
        kind, text = self._peek()
        if self._take("{"):
            exponent = self._sum()
            self._expect("}")
        elif kind == "number" and text.isdigit():
            self.at += 1
            exponent = _number(text)
        else:
            raise Unreadable("an exponent without braces")
        if self._peek() == ("symbol", "^"):
            raise Unreadable("a power of a power")
        return ball.power(base, exponent)

    def _atom(self) -> Value:
        kind, text = self._peek()
        self.at += 1
        if kind == "number":
            return _number(text)
        if kind == "letter":
            if self._peek() == ("symbol", "("):
                raise Unreadable("may be a call")
            return self.variables[text]
        if kind == "symbol" and text == "(":
            value = self._sum()
            self._expect(")")
            return value
        if kind == "command" and text == "pi":
            if self._peek() == ("symbol", "("):
                raise Unreadable("may be a call")
            return Ball(math.pi, 4 * ball.EPSILON)
        if kind == "command" and text == "frac":
            return ball.divide(self._argument(), self._argument())
        if kind == "command" and text == "sqrt":
            return self._root()
        raise Unreadable(f"{text!r} where a number should be")

    def _root(self) -> Value:
        degree = 2
        if self._take("["):
            kind, text = self._peek()
            if kind != "number" or text not in "3456789":
                raise Unreadable("an unusual root")
            degree = int(text)
            self.at += 1
            self._expect("]")
        return ball.root(self._argument(), degree)

    def _argument(self) -> Value:
        """{...}, or a single digit or letter."""
        if self._take("{"):
            value = self._sum()
            self._expect("}")
            return value
        kind, text = self._peek()
        if len(text) != 1 or kind not in ("number", "letter"):
            raise Unreadable("an argument without braces")
        self.at += 1
        return _number(text) if kind == "number" else self.variables[text]


def _number(digits: str) -> Fraction:
    if len(digits) > 400:
        raise Unreadable("too large")
    return Fraction(digits)
