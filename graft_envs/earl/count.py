"""Count a digit: how often does 3 occur in three hundred and thirty-one?   #### 2

A calculator does not help here. The task is in EARL's mix so that a policy also gets questions that
it should answer without one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from graft.envs.base import BaseEnv, Trace
from graft.envs.splits import split_of
from graft.types import Author
from graft_envs.earl.marked import MAX_TRIES, AboutNumber


class Count(AboutNumber):
    """The answer is the count.

    The length of the number is uniform over `digits`, the digit asked for over 0..9; a share
    `language` of the numbers is in words.
    """

    env_id = "count"
    saved = (*BaseEnv.saved, "number", "digit", "form")

    def __init__(
        self, *, digits: Sequence[int] = (1, 20), language: float = 0.9, split: str = "train"
    ) -> None:
        super().__init__(digits, language, split)
        self.number = ""  # as text: 20 digits are too many for a JSON reader that has only doubles
        self.digit = 0

    def pose(self) -> str:
        for _ in range(MAX_TRIES):
            number = str(self.draw_number())
            digit = self.rng.randrange(10)
            if split_of(f"{digit} in {number}") == self.split:
                break
        else:
            raise ValueError(f"no {self.split} instance with digits={self.digits}; allow more")
        self.number, self.digit = number, digit
        self.answer = str(number.count(str(digit)))
        shown = self.draw_form(int(number))
        return (
            f"How many times does the digit {digit} occur in the number {shown}, written in "
            "digits? Write the final answer after ####, for example: #### 2"
        )

    @property
    def expression(self) -> str:
        """The expression in the original's form, a piece of Python."""
        return f"str({self.number}).count('{self.digit}')"

    def demonstrate(self, rng: random.Random) -> Trace:
        return [(Author.POLICY, f"{' '.join(self.number)}\n#### {self.answer}")]

    def describe(self) -> dict[str, Any]:
        return {"number": self.number, "digit": self.digit, "form": self.form}
