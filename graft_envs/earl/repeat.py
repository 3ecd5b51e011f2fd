"""A number in digits: Write twelve in digits.   #### 12

Half of the numbers are given in words. As in `count`, a calculator does not help.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from graft.envs.base import BaseEnv, Trace
from graft.envs.splits import split_of
from graft.types import Author
from graft_envs.earl.marked import MAX_TRIES, AboutNumber


class Repeat(AboutNumber):
    """The length of the number is uniform over `digits`; a share `language` of them is in words."""

    env_id = "repeat"
    saved = (*BaseEnv.saved, "form")

    def __init__(
        self, *, digits: Sequence[int] = (1, 10), language: float = 0.5, split: str = "train"
    ) -> None:
        super().__init__(digits, language, split)

    def pose(self) -> str:
        for _ in range(MAX_TRIES):
            number = self.draw_number()
            if split_of(f"repeat {number}") == self.split:
                break
        else:
            raise ValueError(f"no {self.split} instance with digits={self.digits}; allow more")
        self.answer = str(number)
        return f"Write {self.draw_form(number)} in digits after ####, for example: #### 100"

    @property
    def expression(self) -> str:
        return self.answer

    def demonstrate(self, rng: random.Random) -> Trace:
        return [(Author.POLICY, f"#### {self.answer}")]

    def describe(self) -> dict[str, Any]:
        return {"form": self.form}
