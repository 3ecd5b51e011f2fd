"""A number in digits: Write twelve in digits.   #### 12

Half of the numbers are given in words. As in `count`, a calculator does not help.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from graft.envs.base import BaseEnv, Trace
from graft.envs.earl.marked import MAX_TRIES, MarkedNumber
from graft.envs.splits import check_range, check_split, split_of
from graft.envs.wording import TOO_LARGE, number_in_words
from graft.types import Author


class Repeat(MarkedNumber):
    """The length of the number is uniform over `digits`; a share `language` of them is in words."""

    env_id = "repeat"
    saved = (*BaseEnv.saved, "form")

    def __init__(
        self, *, digits: Sequence[int] = (1, 10), language: float = 0.5, split: str = "train"
    ) -> None:
        super().__init__()
        self.digits = check_range("digits", digits, 1)
        if 10 ** self.digits[1] > TOO_LARGE:
            raise ValueError(f"digits={digits!r}: numbers have words below {TOO_LARGE:.0e}")
        if not 0.0 <= language <= 1.0:
            raise ValueError(f"language={language}: a share of the questions, must lie in 0..1")
        self.language = language
        self.split = check_split(split)
        self.form = "digits"

    def pose(self) -> str:
        for _ in range(MAX_TRIES):
            length = self.rng.randint(*self.digits)
            number = self.rng.randrange(10 ** (length - 1), 10**length)
            if split_of(f"repeat {number}") == self.split:
                break
        else:
            raise ValueError(f"no {self.split} instance with digits={self.digits}; allow more")
        self.answer = str(number)
        self.form = "numbers" if self.rng.random() < self.language else "digits"
        shown = number_in_words(number) if self.form == "numbers" else self.answer
        return f"Write {shown} in digits after ####, for example: #### 100"

    @property
    def expression(self) -> str:
        return self.answer

    def demonstrate(self, rng: random.Random) -> Trace:
        return [(Author.POLICY, f"#### {self.answer}")]

    def describe(self) -> dict[str, Any]:
        return {"form": self.form}
