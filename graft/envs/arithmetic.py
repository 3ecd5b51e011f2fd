"""Questions with long arithmetic expressions, with parentheses and division, as EARL trains on."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction

from graft.envs.base import BaseEnv, Trace
from graft.envs.splits import check_split, split_of
from graft.envs.wording import flat_in_words, numbers_in_words, operators_in_words
from graft.registry import resolve
from graft.rewards.answers import last_marked
from graft.rewards.numbers import same_number
from graft.text.parse import last_number, marked_number
from graft.tools.calculator import CalculatorError, evaluate, format_number, work
from graft.types import Author, Turn

MAX_TRIES = 100_000  # draws until an instance has the wanted split and size
MAX_VALUE = 10**9
MAX_TEXT = 98  # characters of expression and value together

READERS: dict[str, Callable[[str], str | None]] = {
    "line": last_marked,
    "marked": marked_number,
    "last": last_number,
}
"""How the answer is read from a text; None if it has none."""


def draw_number(rng: random.Random, digits: int) -> int:
    """A whole number of exactly `digits` digits, never 0."""
    return rng.randrange(10 ** (digits - 1), 10**digits)


def draw_nested(rng: random.Random, digits: int, operations: int) -> str:
    """A random expression with parentheses: "(81 - 7) * 3050". Numbers have up to `digits` digits.

    The operations are split at random between both sides of an operator; a side that is not a number
    is put in parentheses three times in ten.
    """
    if operations == 0:
        return str(draw_number(rng, rng.randint(1, digits)))
    return " ".join(draw_join(rng, digits, operations))


def draw_join(rng: random.Random, digits: int, operations: int) -> tuple[str, str, str]:
    """The same as three parts: ("(81 - 7)", "*", "3050")."""
    on_the_left = rng.randrange(operations)
    sides: list[str] = []
    for share in (on_the_left, operations - 1 - on_the_left):
        side = draw_nested(rng, digits, share)
        sides.append(f"({side})" if share and rng.random() < 0.3 else side)
    return sides[0], rng.choice("+-*/"), sides[1]


def value_of(expression: str) -> Fraction | None:
    """The value; None if the text is not arithmetic, or divides by zero."""
    try:
        return evaluate(expression)
    except CalculatorError:
        return None


def value_in_bounds(expression: str) -> Fraction | None:
    """The value if an answer can be exact: below 10^9, at most three decimals. Else None."""
    value = value_of(expression)
    if value is None or value >= MAX_VALUE or (value * 1000).denominator != 1:
        return None
    return value


class Arithmetic(BaseEnv):
    """What is (81 - 7) * 3050? One turn, 1.0 for the right value, else 0.0.

    Always exactly `operations` operators; numbers of up to `digits` digits; values below 10^9 that
    need no more than three decimals, so that the expected text is exact.

    A share `language` of the questions is in words, half of them with the numbers in words and half
    with the operators; `flat=True` leaves out the parentheses that make the latter unambiguous. The
    right value is that of `expression` in every form. `read` says which number counts:

    line    the whole line after the last "####" must be the number
    marked  the number that follows the last "####" that a number follows
    last    the last number anywhere in the text
    """

    env_id = "arithmetic"
    saved = (*BaseEnv.saved, "expression", "form")

    def __init__(
        self,
        *,
        digits: int = 4,
        operations: int = 3,
        language: float = 0.0,
        flat: bool = False,
        read: str = "line",
        split: str = "train",
    ) -> None:
        super().__init__()
        # larger ones do not fit the limits above
        if not (1 <= digits <= 9 and 1 <= operations <= 20):
            raise ValueError(f"{digits=}, {operations=}: must lie in 1..9 and in 1..20")
        if not 0.0 <= language <= 1.0:
            raise ValueError(f"language={language}: a share of the questions, must lie in 0..1")
        self.digits = digits
        self.operations = operations
        self.language = language
        self.flat = flat
        self.read = resolve(read, READERS, "way to read an answer")
        self.split = check_split(split)
        self.expression = ""
        self.form = "digits"

    def pose(self) -> str:
        for _ in range(MAX_TRIES):
            join = draw_join(self.rng, self.digits, self.operations)
            expression = " ".join(join)
            if split_of(expression) != self.split:  # first: a hash is cheaper than evaluating
                continue
            value = value_in_bounds(expression)
            answer = "" if value is None else format_number(value)
            if answer and len(expression + answer) < MAX_TEXT:
                self.expression, self.answer = expression, answer
                return (
                    f"What is {self._word(join)}? Write the final answer after ####, with three "
                    "digits after the point if it is not a whole number. "
                    "Examples: #### 2 or #### 0.333"
                )
        raise ValueError(
            f"no expression with digits={self.digits}, operations={self.operations} fits "
            f"{MAX_TEXT} characters and 10^9; lower them"
        )

    def respond(self, action: str) -> Turn:
        is_right = same_number(self.read(action) or "", self.answer)
        return Turn(reward=float(is_right), terminated=True, info={"is_right": is_right})

    def demonstrate(self, rng: random.Random) -> Trace:
        lines = [
            f"{format_number(step.left)} {step.operator} {format_number(step.right)}"
            f" = {format_number(step.value)}"
            for step in work(self.expression).steps
        ]
        return [(Author.POLICY, "\n".join([*lines, f"#### {self.answer}"]))]

    def describe(self) -> dict[str, str]:
        form = {"form": self.form} if self.language else {}
        return {"expression": self.expression, **form}

    def sample_random_action(self) -> str:
        return f"#### {draw_number(self.action_rng(), self.digits)}"

    def _word(self, join: tuple[str, str, str]) -> str:
        self.form = "digits"
        # without language nothing is drawn, so that the seeds keep their instances
        if self.language and self.rng.random() < self.language:
            self.form = self.rng.choice(("numbers", "operators"))
        match self.form:
            case "numbers":
                return numbers_in_words(self.expression)
            case "operators" if self.flat:
                return f"the {flat_in_words(*join)}"
            case "operators":
                return f"the {operators_in_words(self.expression)}"
            case _:
                return self.expression
