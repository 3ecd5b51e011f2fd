"""EARL's countdown: numbers and target come from one random expression."""

from __future__ import annotations

import json
from collections.abc import Callable

from graft.envs.arithmetic import MAX_TRIES, draw_nested, value_in_bounds
from graft.envs.countdown import NumberPuzzle
from graft.envs.splits import check_split, split_of
from graft.registry import resolve
from graft.rewards.answers import countdown_score
from graft.text.parse import first_answer, first_marked
from graft.tools.calculator import evaluate, format_number, work
from graft.types import Turn


class ExpressionCountdown(NumberPuzzle):
    """Numbers and target come from one random expression, as in EARL; 1.0 or 0.0.

    The expression has `operations` operators and numbers of up to `digits` digits, so small numbers
    are as frequent as large ones; the policy sees the numbers shuffled. `whole=False` admits targets
    with up to three decimals; negative ones occur in any case. `form` is where the answer is read:

    tag     the first <answer>...</answer>
    marked  the line after the first "####"

    Unlike `Countdown` it only accepts the bare expression: no "= target" after it.
    """

    env_id = "expression-countdown"

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

    def _is_solution(self, text: str) -> bool:
        # exact on both sides: no tolerance is needed, and none can be exploited
        target = evaluate(self.solution)
        return "=" not in text and countdown_score(text, self.answer["numbers"], target) == 1.0

    def write(self, expression: str) -> str:
        return f"<answer> {expression} </answer>" if self.form == "tag" else f"#### {expression}"


FORMS: dict[str, Callable[[str], str | None]] = {"tag": first_answer, "marked": first_marked}
ASK_TAG = (
    "Think in <think> </think> tags, then give the expression in <answer> </answer> tags, "
    "for example <answer> (1 + 2) / 3 </answer>."
)
ASK_MARKED = (
    "Give the expression after ####. For example, with the numbers [1, 2, 3] and the target 1: "
    "#### (1 + 2) / 3"
)
