"""Arithmetic expressions, in two dresses.

`Arithmetic` asks in words and wants the value after "####": long expressions with parentheses and
division, as EARL trains on. `CalculatorTask` is for models that read single characters:

    12+34*5=                 the prompt
    [34*5]   170;            a call, and the result that the env appends
    [12+170] 182;            one operation per call: what comes first has to be known
    182                      the answer; end of text
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from fractions import Fraction

from graft.envs.base import BaseEnv, Trace, check_range, check_split, split_of
from graft.envs.tooled import COMPACT, ToolEnv
from graft.envs.wording import (
    flat_in_words,
    marked_number,
    numbers_in_words,
    operators_in_words,
)
from graft.registry import resolve
from graft.rewards.answers import last_marked, same_number
from graft.text.parse import last_number
from graft.tools.calculator import (
    MAX_DIGITS,
    Calculator,
    CalculatorError,
    evaluate,
    format_number,
    work,
)
from graft.types import Author, Turn

MAX_TRIES = 100_000  # draws until an instance of the wanted split and size turns up
MAX_VALUE = 10**9
MAX_TEXT = 98  # characters of expression and value together

READERS: dict[str, Callable[[str], str | None]] = {
    "line": last_marked,
    "marked": marked_number,
    "last": last_number,
}
"""Which number of a text is its answer; None if there is none."""


def draw_number(rng: random.Random, digits: int) -> int:
    """A whole number of exactly so many digits, never 0."""
    return rng.randrange(10 ** (digits - 1), 10**digits)


def draw_nested(rng: random.Random, digits: int, operations: int) -> str:
    """A random expression with parentheses: "(81 - 7) * 3050". Numbers have up to `digits` digits.

    The operations are shared out at random between both sides of an operator; a side that is not a
    number is put in parentheses three times in ten.
    """
    if operations == 0:
        return str(draw_number(rng, rng.randint(1, digits)))
    return " ".join(draw_join(rng, digits, operations))


def draw_join(rng: random.Random, digits: int, operations: int) -> tuple[str, str, str]:
    """The same before it is put together: ("(81 - 7)", "*", "3050")."""
    on_the_left = rng.randrange(operations)
    sides: list[str] = []
    for share in (on_the_left, operations - 1 - on_the_left):
        side = draw_nested(rng, digits, share)
        sides.append(f"({side})" if share and rng.random() < 0.3 else side)
    return sides[0], rng.choice("+-*/"), sides[1]


def value_in_bounds(expression: str) -> Fraction | None:
    """The value if an answer can state it exactly: below 10^9, no more than three decimals."""
    try:
        value = evaluate(expression)
    except CalculatorError:  # a division by zero
        return None
    return value if value < MAX_VALUE and (value * 1000).denominator == 1 else None


def draw_flat(
    rng: random.Random, operands: tuple[int, int], digits: tuple[int, int], operators: str
) -> str:
    """A random expression without parentheses or blanks: "12+34*5"."""
    text = str(draw_number(rng, rng.randint(*digits)))
    for _ in range(rng.randint(*operands) - 1):
        text += rng.choice(operators) + str(draw_number(rng, rng.randint(*digits)))
    return text


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
        if not (1 <= digits <= 9 and 1 <= operations <= 20):  # else nothing fits the limits above
            raise ValueError(
                f"digits={digits}, operations={operations}: must lie in 1..9 and in 1..20"
            )
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
            if split_of(expression) != self.split:  # first: a hash is cheaper than a sum
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
            f"{MAX_TEXT} characters and 10^9; ask for fewer"
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
        return f"#### {draw_number(self.whim(), self.digits)}"

    def _word(self, join: tuple[str, str, str]) -> str:
        self.form = "digits"
        # without language nothing is drawn: such seeds name the same instances as ever
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


class Expression(BaseEnv):
    """12+34*5= in one turn: 1.0 if the whole text is the value, else 0.0.

    Operators are taken from + - *: with them every intermediate result is a whole number. It
    may be negative, but only as a left operand (12-34+5: first 12-34, then -22+5), which the
    calculator reads without parentheses.
    """

    env_id = "expression"
    saved = (*BaseEnv.saved, "expression")

    def __init__(
        self,
        *,
        operands: Sequence[int] = (2, 3),
        digits: Sequence[int] = (2, 3),
        operators: str = "+-*",
        split: str = "train",
    ) -> None:
        super().__init__()
        if not operators or set(operators) - set("+-*"):
            raise ValueError(f"operators={operators!r}: must be some of + - *")
        self.operands = check_range("operands", operands, 2)
        self.digits = check_range("digits", digits, 1)
        if self.operands[1] * self.digits[1] > MAX_DIGITS:
            raise ValueError(
                f"{self.operands[1]} operands of {self.digits[1]} digits: their product would have "
                f"more than the {MAX_DIGITS} digits of the calculator"
            )
        self.operators = operators
        self.split = check_split(split)
        self.expression = ""

    def pose(self) -> str:
        for _ in range(MAX_TRIES):
            expression = draw_flat(self.rng, self.operands, self.digits, self.operators)
            if split_of(expression) == self.split:
                self.expression, self.answer = expression, format_number(evaluate(expression))
                return f"{expression}="
        raise ValueError(
            f"no {self.split} expression with operands={self.operands}, digits={self.digits}, "
            f"operators={self.operators!r}; allow more of them"
        )

    def respond(self, action: str) -> Turn:
        is_right = same_number(action, self.answer)
        return Turn(reward=float(is_right), terminated=True, info={"is_right": is_right})

    def describe(self) -> dict[str, str]:
        return {"expression": self.expression}

    def guess(self, rng: random.Random) -> str:
        """A number of the answer's sign and about its length: right one time in 90 at best."""
        value = int(self.answer)
        size = draw_number(rng, max(2, len(str(abs(value))) + rng.randint(-1, 1)))
        return str(-size if value < 0 else size)


class CalculatorTask(ToolEnv):
    """An `Expression` and a calculator that does one operation per call; see the top of this file.

    A call that makes no sense is answered with "?;" and the episode goes on. `tool=False` leaves
    the calculator out: mental arithmetic, for comparison.
    """

    def __init__(
        self,
        *,
        operands: Sequence[int] = (2, 3),
        digits: Sequence[int] = (2, 3),
        operators: str = "+-*",
        split: str = "train",
        tool: bool = True,
        max_uses: int = 4,
    ) -> None:
        env = Expression(operands=operands, digits=digits, operators=operators, split=split)
        tools = [Calculator(max_operations=1)] if tool else []
        styles = {Calculator.name: COMPACT} if tool else None
        super().__init__(env, tools, styles=styles, max_uses=max_uses)
        env.env_id = "calculator"

    @property
    def alphabet(self) -> str:
        """Every character that occurs in prompts, results and demonstrations, sorted."""
        style = "".join((COMPACT.open, COMPACT.close, COMPACT.render(""), COMPACT.spent))
        return "".join(
            sorted({*"0123456789=", *self.env.operators, *(style if self.tools else "")})
        )

    def demonstrate(self, rng: random.Random, tool_rate: float = 0.35) -> Trace:
        """With probability `tool_rate` the calls and the right answer, else a guess.

        Imitating this gives a policy that knows both ways and prefers the hopeless one: what is
        left to learn is when to call.
        """
        inner: Expression = self.env
        if rng.random() >= tool_rate:
            return [(Author.POLICY, inner.guess(rng))]
        trace: Trace = []
        for step in work(inner.expression).steps if self.tools else ():
            trace.append((Author.POLICY, f"{COMPACT.open}{step.text}{COMPACT.close}"))
            trace.append((Author.ENV, COMPACT.render(self.tools[Calculator.name](step.text))))
        return [*trace, (Author.POLICY, inner.answer)]

    def sample_random_action(self) -> str:
        """A call or an answer, each half the time."""
        rng = self.env.whim()
        if self.tools and rng.random() < 0.5:
            content = draw_flat(rng, (2, 2), self.env.digits, self.env.operators)
            return f"{COMPACT.open}{content}{COMPACT.close}"
        return self.env.guess(rng)
