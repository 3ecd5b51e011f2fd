"""Countdown: combine the given numbers, each exactly once, into the target.

numbers 3, 7, 12 and target 33   ->   <answer>(7 - 3) * 12 - 15</answer>   0.1: no 15 was given
                                 ->   <answer>12 + 7 * 3</answer>          1.0
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from fractions import Fraction

from graft.envs.arithmetic import draw_nested, value_in_bounds
from graft.envs.base import BaseEnv, Trace, check_range, check_split, split_of
from graft.registry import resolve
from graft.rewards.answers import countdown_score
from graft.text.parse import last_tag
from graft.tools.calculator import CalculatorError, evaluate, format_number, work
from graft.types import Author, Turn

MAX_TRIES = 100_000  # draws until an instance of the wanted split and range turns up
SIGNS = "+-*/"


def draw_solution(rng: random.Random, numbers: Sequence[int]) -> str:
    """A random expression that uses the numbers once each: [3, 7, 12] -> "(7 - 3) * 12".

    Two random pieces are joined by a random operator until one piece is left, so every shape of
    tree and every order can come up.
    """
    pieces = [str(number) for number in numbers]
    while len(pieces) > 1:
        left = pieces.pop(rng.randrange(len(pieces)))
        right = pieces.pop(rng.randrange(len(pieces)))
        pieces.append(f"({left} {rng.choice(SIGNS)} {right})")
    return pieces[0][1:-1] if len(numbers) > 1 else pieces[0]  # without the outermost parentheses


class Countdown(BaseEnv):
    """1.0 for a right expression, `format_reward` for a wrong one in the right form, else 0.0.

    Targets come from a random expression over the numbers, so every instance can be solved. The
    form is `<tag>...</tag>`, of which the last counts; with `tag=None` the whole text is the answer
    and the form is right if it is arithmetic at all.
    """

    env_id = "countdown"
    saved = (*BaseEnv.saved, "solution")

    def __init__(
        self,
        *,
        count: Sequence[int] = (3, 4),
        numbers: Sequence[int] = (1, 99),
        targets: Sequence[int] = (1, 999),
        tag: str | None = "answer",
        format_reward: float = 0.1,
        split: str = "train",
    ) -> None:
        super().__init__()
        if not 0.0 <= format_reward < 1.0:
            raise ValueError(f"format_reward={format_reward}: must lie in [0, 1)")
        self.count = check_range("count", count, 2)
        self.numbers = check_range("numbers", numbers, 1)
        self.targets = check_range("targets", targets, 0)
        self.tag = tag
        self.format_reward = format_reward
        self.split = check_split(split)
        self.solution = ""

    def pose(self) -> str:
        for _ in range(MAX_TRIES):
            given = [self.rng.randint(*self.numbers) for _ in range(self.rng.randint(*self.count))]
            solution = draw_solution(self.rng, given)
            target = self._target_of(solution)
            if target is not None and split_of(f"{sorted(given)} {target}") == self.split:
                self.solution = solution
                self.answer = {"numbers": given, "target": target}
                return self._ask(given, target)
        raise ValueError(
            f"no {self.split} instance with count={self.count}, numbers={self.numbers}, "
            f"targets={self.targets}; widen them"
        )

    def respond(self, action: str) -> Turn:
        text = last_tag(action, self.tag) if self.tag else action
        has_form = text is not None and (self.tag is not None or _is_arithmetic(text))
        score = countdown_score(text or "", self.answer["numbers"], self.answer["target"])
        reward = score or (self.format_reward if has_form else 0.0)
        return Turn(
            reward=reward, terminated=True, info={"is_right": score == 1.0, "has_form": has_form}
        )

    def demonstrate(self, rng: random.Random) -> Trace:
        return [(Author.POLICY, self._write(self.solution))]

    def describe(self) -> dict[str, str]:
        return {"solution": self.solution}

    def sample_random_action(self) -> str:
        return self._write(draw_solution(self.whim(), self.answer["numbers"]))

    def _target_of(self, solution: str) -> int | None:
        """The value of an expression if it can be a target."""
        try:
            value: Fraction = evaluate(solution)
        except CalculatorError:  # a division by zero
            return None
        low, high = self.targets
        return int(value) if value.denominator == 1 and low <= value <= high else None

    def _ask(self, given: Sequence[int], target: int) -> str:
        listed = ", ".join(str(number) for number in given)
        where = f", for example {self._write('(1 + 2) / 3')}" if self.tag else " and nothing else"
        return (
            f"Combine the numbers {listed} into {target}. Use each number exactly once, with "
            f"+, -, *, / and parentheses. Write the expression{where}."
        )

    def _write(self, expression: str) -> str:
        return f"<{self.tag}>{expression}</{self.tag}>" if self.tag else expression


class ExpressionCountdown(BaseEnv):
    """Numbers and target come from one random expression, as in EARL; 1.0 or 0.0.

    The expression has `operations` operators and numbers of up to `digits` digits, so small numbers
    are as frequent as large ones; the policy sees the numbers shuffled. `whole=False` admits targets
    with up to three decimals; negative ones occur in any case. `form` says where the answer stands:

    tag     the first <answer>...</answer>
    marked  the line after the first "####"

    Unlike `Countdown` it takes nothing but the bare expression: no "= target" after it.
    """

    env_id = "expression-countdown"
    saved = (*BaseEnv.saved, "solution")

    def __init__(
        self,
        *,
        digits: int = 4,
        operations: int = 3,
        whole: bool = True,
        form: str = "tag",
        split: str = "train",
    ) -> None:
        super().__init__()
        if not (1 <= digits <= 9 and 1 <= operations <= 9):
            raise ValueError(f"digits={digits}, operations={operations}: must each lie in 1..9")
        self.digits = digits
        self.operations = operations
        self.whole = whole
        self.form = form
        self.read = resolve(form, FORMS, "form of a countdown answer")
        self.split = check_split(split)
        self.solution = ""

    def pose(self) -> str:
        for _ in range(MAX_TRIES):
            solution = draw_nested(self.rng, self.digits, self.operations)
            value = value_in_bounds(solution)
            if value is None or (self.whole and value.denominator != 1):
                continue
            given = [int(number) for number in work(solution).numbers]
            target = format_number(value)
            if split_of(f"{sorted(given)} {target}") == self.split:
                break
        else:
            raise ValueError(
                f"no {self.split} instance with digits={self.digits}, "
                f"operations={self.operations}; allow more of them"
            )
        self.rng.shuffle(given)
        self.solution = solution
        self.answer = {"numbers": given, "target": json.loads(target)}
        return (
            f"Given are the numbers {given}. Write an expression that equals {target} and uses "
            "each of them exactly once, with +, -, *, / and parentheses. "
            + (ASK_TAG if self.form == "tag" else ASK_MARKED)
        )

    def respond(self, action: str) -> Turn:
        text = self.read(action)
        is_right = text is not None and self._is_solution(text.strip())
        info = {"is_right": is_right, "has_form": text is not None}
        return Turn(reward=float(is_right), terminated=True, info=info)

    def demonstrate(self, rng: random.Random) -> Trace:
        return [(Author.POLICY, self._write(self.solution))]

    def describe(self) -> dict[str, str]:
        return {"solution": self.solution}

    def sample_random_action(self) -> str:
        return self._write(draw_solution(self.whim(), self.answer["numbers"]))

    def _is_solution(self, text: str) -> bool:
        # exact on both sides: no tolerance is needed, and none can be exploited
        target = evaluate(self.solution)
        return "=" not in text and countdown_score(text, self.answer["numbers"], target) == 1.0

    def _write(self, expression: str) -> str:
        return f"<answer> {expression} </answer>" if self.form == "tag" else f"#### {expression}"


def first_answer(text: str) -> str | None:
    """What the first <answer>...</answer> holds: "<answer>1+2</answer> <answer>3</answer>" -> 1+2."""
    start = text.find("<answer>")
    end = text.find("</answer>", start)
    return text[start + len("<answer>") : end] if 0 <= start < end else None


def first_marked(text: str) -> str | None:
    """The line after the first "####", blanks and line ends before it passed over."""
    _, mark, rest = text.partition("####")
    return rest.lstrip().partition("\n")[0] if mark else None


FORMS: dict[str, Callable[[str], str | None]] = {"tag": first_answer, "marked": first_marked}
ASK_TAG = (
    "Think in <think> </think> tags, then give the expression in <answer> </answer> tags, "
    "for example <answer> (1 + 2) / 3 </answer>."
)
ASK_MARKED = (
    "Give the expression after ####. For example, with the numbers [1, 2, 3] and the target 1: "
    "#### (1 + 2) / 3"
)


def _is_arithmetic(text: str) -> bool:
    try:
        evaluate(text.partition("=")[0])
    except CalculatorError:
        return False
    return True
