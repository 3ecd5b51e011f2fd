"""Countdown: combine the given numbers, each exactly once, into the target.

numbers 3, 7, 12 and target 33   ->   <answer>(7 - 3) * 12 - 15</answer>   0.1: no 15 was given
                                 ->   <answer>12 + 7 * 3</answer>          1.0
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from graft.envs.arithmetic import MAX_TRIES, value_of
from graft.envs.base import BaseEnv, Trace
from graft.envs.splits import check_range, check_split, split_of
from graft.rewards.answers import countdown_score
from graft.text.parse import last_tag
from graft.types import Author, Turn

SIGNS = "+-*/"


def draw_solution(rng: random.Random, numbers: Sequence[int]) -> str:
    """A random expression that uses the numbers once each: [3, 7, 12] -> "(7 - 3) * 12".

    Two random pieces are joined by a random operator until one piece is left, so every shape of
    tree and every order can occur.
    """
    pieces = [str(number) for number in numbers]
    while len(pieces) > 1:
        left = pieces.pop(rng.randrange(len(pieces)))
        right = pieces.pop(rng.randrange(len(pieces)))
        pieces.append(f"({left} {rng.choice(SIGNS)} {right})")
    return pieces[0][1:-1] if len(numbers) > 1 else pieces[0]  # without the outermost parentheses


class NumberPuzzle(BaseEnv):
    """Numbers and a target; a subclass draws them and defines how an answer is written."""

    saved = (*BaseEnv.saved, "solution")

    def __init__(self) -> None:
        super().__init__()
        self.solution = ""

    def write(self, expression: str) -> str:
        """An answer as the policy has to write it."""
        raise NotImplementedError(f"{type(self).__name__} must write write()")

    def demonstrate(self, rng: random.Random) -> Trace:
        return [(Author.POLICY, self.write(self.solution))]

    def describe(self) -> dict[str, str]:
        return {"solution": self.solution}

    def sample_random_action(self) -> str:
        return self.write(draw_solution(self.action_rng(), self.answer["numbers"]))


class Countdown(NumberPuzzle):
    """1.0 for a right expression, `format_reward` for a wrong one in the right form, else 0.0.

    Targets come from a random expression over the numbers, so every instance can be solved. The
    form is `<tag>...</tag>`, of which the last counts; with `tag=None` the whole text is the answer
    and the form is right if it is arithmetic. `question` is another wording, with {numbers} and
    {target}.
    """

    env_id = "countdown"

    def __init__(
        self,
        *,
        count: Sequence[int] = (3, 4),
        numbers: Sequence[int] = (1, 99),
        targets: Sequence[int] = (1, 999),
        tag: str | None = "answer",
        format_reward: float = 0.1,
        question: str = "",
        split: str = "train",
    ) -> None:
        super().__init__()
        if question and not all(part in question for part in ("{numbers}", "{target}")):
            raise ValueError(f"question={question!r} must contain {{numbers}} and {{target}}")
        self.question = question
        if not 0.0 <= format_reward < 1.0:
            raise ValueError(f"format_reward={format_reward}: must lie in [0, 1)")
        self.count = check_range("count", count, 2)
        self.numbers = check_range("numbers", numbers, 1)
        self.targets = check_range("targets", targets, 0)
        self.tag = tag
        self.format_reward = format_reward
        self.split = check_split(split)

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
        is_form = self.tag is not None or value_of(action.partition("=")[0]) is not None
        has_form = text is not None and is_form
        score = countdown_score(text or "", self.answer["numbers"], self.answer["target"])
        reward = score or (self.format_reward if has_form else 0.0)
        return Turn(
            reward=reward, terminated=True, info={"is_right": score == 1.0, "has_form": has_form}
        )

    def _target_of(self, solution: str) -> int | None:
        """The value of an expression if it can be a target; else None."""
        value, (low, high) = value_of(solution), self.targets
        if value is None or value.denominator != 1 or not low <= value <= high:
            return None
        return int(value)

    def _ask(self, given: Sequence[int], target: int) -> str:
        listed = ", ".join(str(number) for number in given)
        if self.question:
            return self.question.replace("{numbers}", listed).replace("{target}", str(target))
        where = f", for example {self.write('(1 + 2) / 3')}" if self.tag else " and nothing else"
        return (
            f"Combine the numbers {listed} into {target}. Use each number exactly once, with "
            f"+, -, *, / and parentheses. Write the expression{where}."
        )

    def write(self, expression: str) -> str:
        return f"<{self.tag}>{expression}</{self.tag}>" if self.tag else expression
