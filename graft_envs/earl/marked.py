"""Questions of CalcBench whose answer is one number after "####"."""

from __future__ import annotations

from collections.abc import Sequence

from graft.envs.base import BaseEnv
from graft.envs.splits import check_range, check_split
from graft.envs.wording import TOO_LARGE, number_in_words
from graft.rewards.numbers import same_number
from graft.text.parse import marked_number
from graft.types import Turn

MAX_TRIES = 10_000  # draws until an instance has the wanted split


class MarkedNumber(BaseEnv):
    """One turn: 1.0 if the number after the last "####" is the answer, else 0.0."""

    def respond(self, action: str) -> Turn:
        is_right = same_number(marked_number(action) or "", self.answer)
        return Turn(reward=float(is_right), terminated=True, info={"is_right": is_right})

    def sample_random_action(self) -> str:
        return f"#### {self.action_rng().randrange(10)}"


class AboutNumber(MarkedNumber):
    """A question about one number, of a length that is uniform over `digits`; a share `language` of the
    numbers is in words."""

    def __init__(self, digits: Sequence[int], language: float, split: str) -> None:
        super().__init__()
        self.digits = check_range("digits", digits, 1)
        if 10 ** self.digits[1] > TOO_LARGE:
            raise ValueError(f"digits={digits!r}: numbers have words below {TOO_LARGE:.0e}")
        if not 0.0 <= language <= 1.0:
            raise ValueError(f"language={language}: a share of the questions, must lie in 0..1")
        self.language = language
        self.split = check_split(split)
        self.form = "digits"

    def draw_number(self) -> int:
        length = self.rng.randint(*self.digits)
        return self.rng.randrange(10 ** (length - 1), 10**length)

    def draw_form(self, number: int) -> str:
        """The number as the question shows it."""
        self.form = "numbers" if self.rng.random() < self.language else "digits"
        return number_in_words(number) if self.form == "numbers" else str(number)
