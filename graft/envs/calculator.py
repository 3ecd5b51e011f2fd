"""Arithmetic for models that read single characters, with a calculator to call:

12+34*5=                 the prompt
[34*5]   170;            a call, and the result that the env appends
[12+170] 182;            one operation per call: the policy has to know which comes first
182                      the answer; end of text

With syntax="actions" a call is made of actions beyond the vocabulary, a `CallText`; the answer is 170,
and the actions write the brackets and the semicolon.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from graft.envs.arithmetic import MAX_TRIES, draw_number
from graft.envs.base import BaseEnv, Trace
from graft.envs.splits import check_range, check_split, split_of
from graft.envs.tool_env import ToolEnv
from graft.registry import resolve
from graft.rewards.numbers import same_number
from graft.tools.calculator import MAX_DIGITS, Calculator, evaluate, format_number, keys_of, work
from graft.tools.formats import COMPACT, COMPACT_BARE, CallStyle
from graft.types import Author, CallText, Turn


class CalculatorSyntax(NamedTuple):
    """One way to write, answer and explain calls of a calculator."""

    format: str
    """A call format of `graft.tools.formats`; in "actions" the answer is only the value."""
    style: CallStyle
    call: str
    """The text of a call; "{}" stands for the expression."""
    gap: str = ""
    """What a teacher writes between a result and the next text."""
    hint: str = ""
    """What the system message says about the calculator."""

    def write(self, expression: str, lead: str = "") -> CallText:
        text = lead + self.call.replace("{}", expression)
        return CallText(text, Calculator.name, keys_of(expression))


SYNTAXES = {
    "compact": CalculatorSyntax("tags", COMPACT, "[{}]"),
    "actions": CalculatorSyntax("actions", COMPACT_BARE, "[{}]"),
}


def draw_flat(
    rng: random.Random, operands: tuple[int, int], digits: tuple[int, int], operators: str
) -> str:
    """A random expression without parentheses or blanks: "12+34*5"."""
    text = str(draw_number(rng, rng.randint(*digits)))
    for _ in range(rng.randint(*operands) - 1):
        text += rng.choice(operators) + str(draw_number(rng, rng.randint(*digits)))
    return text


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
                f"{self.operands[1]} operands of {self.digits[1]} digits: their product may have "
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


class CalculatorEnv(ToolEnv):
    """A question with a calculator; None leaves the calculator out."""

    shared = (*ToolEnv.shared, "syntax")

    def __init__(
        self,
        env: BaseEnv,
        calculator: Calculator | None,
        syntax: CalculatorSyntax,
        max_uses: int | None,
    ) -> None:
        tools = [] if calculator is None else [calculator]
        styles = {tool.name: syntax.style for tool in tools}
        super().__init__(env, tools, format=syntax.format, styles=styles, max_uses=max_uses)
        self.syntax = syntax

    def calls(self, expressions: Iterable[str]) -> Trace:
        """A call for each expression and its result, as a demonstration shows them."""
        trace: Trace = []
        for expression in expressions:
            call = self.syntax.write(expression, self.syntax.gap if trace else "")
            value = self.tools[Calculator.name](expression)
            trace += [(Author.POLICY, call), (Author.ENV, self.syntax.style.render(value))]
        return trace


class CalculatorTask(CalculatorEnv):
    """An `Expression` and a calculator that does one operation per call; see the top of this file.

    An invalid call is answered with "?;" and the episode goes on. `tool=False` leaves the calculator
    out: mental arithmetic, for comparison. `syntax` is "compact" or "actions".
    """

    def __init__(
        self,
        *,
        operands: Sequence[int] = (2, 3),
        digits: Sequence[int] = (2, 3),
        operators: str = "+-*",
        split: str = "train",
        tool: bool = True,
        syntax: str = "compact",
        max_uses: int = 4,
    ) -> None:
        env = Expression(operands=operands, digits=digits, operators=operators, split=split)
        chosen = resolve(syntax, SYNTAXES, "call syntax")
        super().__init__(env, Calculator(max_operations=1) if tool else None, chosen, max_uses)
        env.env_id = "calculator"

    @property
    def alphabet(self) -> str:
        """Every character that occurs in prompts, results and demonstrations, sorted.

        The same in both syntaxes: actions write the same text.
        """
        style = "".join((COMPACT.open, COMPACT.close, COMPACT.render(""), COMPACT.spent))
        return "".join(
            sorted({*"0123456789=", *self.env.operators, *(style if self.tools else "")})
        )

    def demonstrate(self, rng: random.Random, tool_rate: float = 0.35) -> Trace:
        """Show the calls and the right answer with probability `tool_rate`, else a guess.

        Imitating this gives a policy that can do both and prefers the guess: what is left to learn is
        when to call.
        """
        inner: Expression = self.env
        if rng.random() >= tool_rate:
            return [(Author.POLICY, inner.guess(rng))]
        steps = work(inner.expression).steps if self.tools else ()
        return [*self.calls(step.text for step in steps), (Author.POLICY, inner.answer)]

    def sample_random_action(self) -> str:
        """A call or an answer, each half the time."""
        rng = self.env.action_rng()
        if self.tools and rng.random() < 0.5:
            return self.syntax.write(draw_flat(rng, (2, 2), self.env.digits, self.env.operators))
        return self.env.guess(rng)
