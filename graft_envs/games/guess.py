"""Guess a hidden number; every wrong guess is answered with "higher" or "lower"."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator

from graft.envs.base import Trace
from graft.types import Turn
from graft_envs.games.base import Game, MoveResult, echo, invalid


class GuessTheNumber(Game):
    """1.0 for a hit. At the turn limit 1 - distance / (max - min) of the last guess.

    A bound of None is drawn with each instance: low from 1..10, high 5 to 50 above it. Then
    max_turns=None allows one turn more than the square root of the range. Hidden 7 of 1..10:

        5 -> "higher", 9 -> "lower", 7 -> reward 1
    """

    pattern = re.compile(r"\\boxed\{\s*+(\d++)\s*+\}", re.ASCII)
    saved = (*Game.saved, "low", "high", "tried")

    def __init__(
        self, *, min_number: int | None = 1, max_number: int | None = 20, max_turns: int | None = 10
    ) -> None:
        super().__init__(max_turns)
        most = 10 if min_number is None else min_number
        if max_number is not None and not most < max_number:
            drawn = " (None: drawn from 1..10)" if min_number is None else ""
            raise ValueError(f"max_number={max_number}: must be above {min_number=}{drawn}")
        if (max_number or 0) >= 10**9:
            raise ValueError(f"max_number={max_number}: must be below 10^9")
        if (min_number or 0) < 0:
            raise ValueError(f"min_number={min_number}: must be 0 or more; guesses have no sign")
        self.min_number, self.max_number, self.limit = min_number, max_number, max_turns
        self.is_fixed = None not in (min_number, max_number, max_turns)
        self.low, self.high = min_number or 0, max_number or 0
        self.last = 0
        self.tried: list[int] = []

    def draw_instance(self) -> None:
        if self.min_number is None:
            self.low = self.rng.randint(1, 10)
        if self.max_number is None:
            self.high = self.low + self.rng.randint(5, 50)
        if self.limit is None:
            self.max_turns = math.ceil(math.sqrt(self.high - self.low)) + 1
        # randint at half its cost; the numbers are equally likely to one part in 2^34
        self.answer = self.low + (self.rng.getrandbits(64) * (self.high - self.low + 1) >> 64)
        self.tried = []

    def rules(self) -> str:
        return (
            f"Find a hidden whole number between {self.low} and {self.high}, both included. After each "
            "guess you are told whether the hidden number is higher or lower.\n"
            f"You have {self.max_turns} turns. Write each guess as \\boxed{{number}}, for example "
            f"\\boxed{{{(self.low + self.high) // 2}}}. What happened so far is shown to you."
        )

    def board(self) -> str:
        return "Your next guess:"

    def move(self, digits: str) -> MoveResult:
        # with too many digits it is out of range; converting would be slow
        self.last = guess = int(digits) if len(digits) < 19 else self.high + 1
        if guess == self.answer:
            return f"{guess}. That is the hidden number.", 1.0, True
        if not self.low <= guess <= self.high:
            return invalid(f"{echo(digits)} is not between {self.low} and {self.high}.")
        if guess in self.tried:
            return invalid(f"{guess} was tried before.")
        self.tried.append(guess)
        if guess < self.answer:
            return f"{digits}. The hidden number is higher.", 0.0, False
        return f"{digits}. The hidden number is lower.", 0.0, False

    def reward_at_limit(self, reward: float) -> float:
        if not self.low <= self.last <= self.high:
            return 0.0
        return 1.0 - abs(self.last - self.answer) / (self.high - self.low)

    def teacher_moves(self, rng: random.Random, random_rate: float = 0.0) -> Iterator[str]:
        """The middle of the numbers left, a random one of the two if there are two.

        With probability `random_rate` any number of the game instead, even one that cannot be right.
        """
        while True:
            if random_rate and rng.random() < random_rate:
                yield str(rng.randint(self.low, self.high))
                continue
            below = max([n for n in self.tried if n < self.answer], default=self.low - 1)
            above = min([n for n in self.tried if n > self.answer], default=self.high + 1)
            yield str((below + above + rng.randrange(2)) // 2)

    def demonstrate(self, rng: random.Random, random_rate: float = 0.0) -> Trace:
        return self.played(lambda twin: twin.teacher_moves(rng, random_rate))

    def sample_random_action(self) -> str:
        return f"\\boxed{{{self.action_rng().randint(self.low, self.high)}}}"


class CompactGuess(GuessTheNumber):
    """The same game in single characters, for models from scratch; rewards and limits are the same.

    task    1-20?
    policy  \\boxed{10}
    env     >?              higher; "<" lower, "!" invalid; the last turn has no "?"
    policy  \\boxed{15}      "=" hit
    """

    alphabet = "0123456789-?<>!=\\boxed{}"

    def rules(self) -> str:
        return f"{self.low}-{self.high}"

    def board(self) -> str:
        return "?"

    def pose(self) -> str:
        return super().pose().replace("\n", "")

    def step(self, action: str) -> Turn:
        num_tried = len(self.tried)
        turn = super().step(action)
        if turn.reward >= 0 and self.last == self.answer:
            sign = "="
        elif len(self.tried) == num_tried:  # no move was found, or the move breaks a rule
            sign = "!"
        else:
            sign = "<>"[self.last < self.answer]
        return turn._replace(observation=sign + turn.info.get("suffix", ""))
