"""Find a secret row of numbers; black and white pegs show how close a guess is."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import permutations, product
from math import perm
from operator import eq

from graft.envs.random_state import RandomState
from graft_envs.games.base import Game, MoveResult, echo, invalid, whole

MAX_CODES = 100_000
"""The most codes that a teacher enumerates; the largest of `SIZES` has 1680."""


class Mastermind(Game):
    """Every black peg beyond the best guess so far pays 1 / code_length.

    Code 1 2 3 4: the guess 1 3 2 6 has one black peg (1) and two white ones (3, 2) and pays 0.25;
    then 1 2 3 4 pays the other 0.75.
    """

    pattern = re.compile(r"\\boxed\{\s*+(\d[\d\s]*+)\}", re.ASCII)
    SIZES = ((2, 4, 10), (4, 6, 20), (4, 8, 30))  # code_length, num_numbers, max_turns
    saved = (*Game.saved, "code_length", "num_numbers", "tried", "best")
    code_length: int
    num_numbers: int

    def __init__(
        self,
        *,
        code_length: int | None = 4,
        num_numbers: int | None = 6,
        duplicate_numbers: bool = False,
        max_turns: int | None = 20,
    ) -> None:
        super().__init__(max_turns, code_length=code_length, num_numbers=num_numbers)
        self.duplicate_numbers = duplicate_numbers
        for length, numbers, _ in self.sizes:
            if min(length, numbers) < 1:
                raise ValueError(f"{code_length=} and {num_numbers=} must be 1 or more")
            if length > numbers and not duplicate_numbers:
                raise ValueError(
                    f"a code of {length} different numbers cannot be drawn from {numbers}; set "
                    "duplicate_numbers=True or num_numbers higher"
                )
        self.tried: dict[str, bool] = {}  # a set, as JSON has none
        self.best = 0

    def draw_instance(self) -> None:
        self.answer = self.draw_row(self.rng)
        self.tried = {}
        self.best = 0

    def rules(self) -> str:
        numbers = "numbers may repeat" if self.duplicate_numbers else "all different"
        example = " ".join(str(1 + place % self.num_numbers) for place in range(self.code_length))
        return (
            f"Find a secret code of {self.code_length} numbers from 1 to {self.num_numbers}, {numbers}. "
            "Each guess is answered with pegs: a black peg for every right number in the right place, a "
            "white peg for every right number in a wrong place.\n"
            f"You have {self.max_turns} turns. Write each guess as \\boxed{{numbers}} with blanks "
            f"between them, for example \\boxed{{{example}}}. What happened so far is shown to you."
        )

    def board(self) -> str:
        return "Your next guess:"

    def move(self, numbers: str) -> MoveResult:
        written = numbers.split()
        if len(written) != self.code_length:
            return invalid(f"{len(written)} numbers were given, the code has {self.code_length}.")
        values = plain_numbers(self.num_numbers)
        guess = [values.get(one, 0) for one in written]
        if 0 in guess:  # out of range, or written differently, such as 01
            guess = [whole(one) for one in written]
            if min(guess) < 1 or max(guess) > self.num_numbers:
                shown = echo(" ".join(written))
                return invalid(f"{shown}: every number must be from 1 to {self.num_numbers}.")
            written = map(str, guess)
        shown = " ".join(written)
        if shown in self.tried:
            return invalid(f"{shown} was tried before.")
        self.tried[shown] = True
        blacks, whites = pegs(guess, self.answer)
        reward = 0.0
        if blacks > self.best:
            self.best = blacks
            reward = self.earn(blacks / self.code_length)
        if blacks == self.code_length:
            return f"{shown}. That is the code.", reward, True
        return f"{shown}. Black pegs: {blacks}, white pegs: {whites}.", reward, False

    def teacher_moves(self, rng: random.Random) -> Iterator[str]:
        """A random code that agrees with all answers so far."""
        numbers, length = range(1, self.num_numbers + 1), self.code_length
        many = self.num_numbers**length if self.duplicate_numbers else perm(len(numbers), length)
        if many > MAX_CODES:
            raise NotImplementedError(
                f"Mastermind: no teacher for {length} of {self.num_numbers} numbers: it "
                f"enumerates all codes, and there are more than {MAX_CODES}; make the code shorter"
            )
        repeated = product(numbers, repeat=length) if self.duplicate_numbers else None
        left = [list(code) for code in repeated or permutations(numbers, length)]
        for guess in self.tried:
            left = self.agreeing(left, [int(word) for word in guess.split()])
        while True:
            guess = rng.choice(left)
            yield " ".join(map(str, guess))
            left = self.agreeing(left, guess)

    def agreeing(self, codes: list[list[int]], guess: list[int]) -> list[list[int]]:
        answer = pegs(guess, self.answer)
        return [code for code in codes if pegs(guess, code) == answer]

    def sample_random_action(self) -> str:
        return f"\\boxed{{{' '.join(map(str, self.draw_row(self.action_rng())))}}}"

    def draw_row(self, rng: RandomState) -> list[int]:
        if self.duplicate_numbers:
            return rng.choices(range(1, self.num_numbers + 1), k=self.code_length)
        # one draw for the whole row: rng.sample makes one for each number
        ways = perm(self.num_numbers, self.code_length)
        bits = 53 + ways.bit_length()
        index = rng.getrandbits(bits) * ways >> bits
        return arrange(index, self.num_numbers, self.code_length)


def pegs(guess: list[int], code: list[int]) -> tuple[int, int]:
    """Right numbers in the right place, and in a wrong one: [1, 1, 2], [1, 2, 3] -> (1, 1)."""
    left = code.copy()
    for number in guess:
        if number in left:  # each number of the code matches one of the guess
            left.remove(number)
    blacks = sum(map(eq, guess, code))
    return blacks, len(code) - len(left) - blacks


def arrange(index: int, num_numbers: int, length: int) -> list[int]:
    """The arrangement of `length` different numbers with this index.

    Of 3 numbers 2: 0 -> [1, 2], 1 -> [2, 1], 2 -> [3, 1], 3 -> [1, 3], ...
    """
    left = list(range(1, num_numbers + 1))
    row: list[int] = []
    for _ in range(length):
        index, at = divmod(index, len(left))
        row.append(left.pop(at))
    return row


@lru_cache(64)
def plain_numbers(num_numbers: int) -> dict[str, int]:
    return {str(number): number for number in range(1, num_numbers + 1)}
