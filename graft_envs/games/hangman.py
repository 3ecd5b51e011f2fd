"""Find a secret word letter by letter, or all at once."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache

from graft_envs.games import words
from graft_envs.games.base import Game, MoveResult, echo, invalid

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_SECRETS = 400
"""Words by which the teacher compares letters."""


class Hangman(Game):
    """Every uncovered place pays 0.5 / word_length, the whole word another 0.5.

    Secret SEE: the letter E pays 0.5 * 2/3, then S pays the rest, as the word SEE would have done.
    `hardcore` draws from the long word list instead of the common words.
    """

    pattern = re.compile(r"\\boxed\{\s*+([A-Za-z]++)\s*+\}", re.ASCII)
    SIZES = ((3, 10), (5, 15), (7, 20))  # word_length, max_turns
    saved = (*Game.saved, "word_length", "tried", "shown")
    word_length: int

    def __init__(
        self, *, word_length: int | None = 5, hardcore: bool = False, max_turns: int | None = 15
    ) -> None:
        super().__init__(max_turns, word_length=word_length)
        self.hardcore = hardcore
        words.check_length(self.word_length, words.full() if hardcore else words.basic())
        self.tried = ""
        self.shown = ""

    def secrets(self) -> tuple[str, ...]:
        return words.full(self.word_length) if self.hardcore else words.basic(self.word_length)

    def draw_instance(self) -> None:
        self.answer = self.rng.choice(self.secrets()).upper()
        self.tried = ""
        self.shown = "_" * self.word_length

    def rules(self) -> str:
        return (
            f"Find a secret English word of {self.word_length} letters; letters that are not known yet "
            "are shown as _. Guess one letter, and it is uncovered wherever it stands, or guess the "
            "whole word.\n"
            f"You have {self.max_turns} turns. Write each guess as \\boxed{{...}}, for example "
            f"\\boxed{{E}} for a letter or \\boxed{{{self.secrets()[0].upper()}}} for the word. What "
            "happened so far is shown to you."
        )

    def board(self) -> str:
        cells = "   ".join(self.shown)
        return f"The word so far:\n{header(self.word_length)}\n  {cells}\nYour next guess:"

    def move(self, letters: str) -> MoveResult:
        guess = letters.upper()
        if len(guess) > 1:
            return self.name_word(guess)
        if guess in self.tried:
            return invalid(f"The letter {guess} was tried before.")
        self.tried += guess
        if guess not in self.answer:
            return f"The letter {guess} is not in the word.", 0.0, False
        self.shown = uncovered(self.answer, self.tried)
        if self.shown == self.answer:
            return f"The letter {guess} completes the word {self.answer}.", self.earn(1.0), True
        known = self.word_length - self.shown.count("_")
        reward = self.earn(0.5 * known / self.word_length)
        return f"The letter {guess} is in the word.", reward, False

    def name_word(self, guess: str) -> MoveResult:
        if guess == self.answer:
            self.shown = guess
            return f"{guess} is the word.", self.earn(1.0), True
        if len(guess) != self.word_length:
            why = f"{echo(guess)} has {len(guess)} letters, the word has {self.word_length}."
            return invalid(why)
        return f"{guess} is not the word.", 0.0, False

    def teacher_moves(self, rng: random.Random) -> Iterator[str]:
        """The letter that narrows the words down most, and the word once at most two are possible."""
        left = [word.upper() for word in self.secrets()]
        while True:
            left = [word for word in left if uncovered(word, self.tried) == self.shown]
            if len(left) > 2:
                yield most_informative(rng, left, self.tried)
            else:
                yield left.pop(rng.randrange(len(left)))

    def sample_random_action(self) -> str:
        rng = self.action_rng()
        letters = [letter for letter in ALPHABET if letter not in self.tried]
        if letters and rng.random() < 0.5:
            return f"\\boxed{{{rng.choice(letters)}}}"
        return f"\\boxed{{{rng.choice(self.secrets()).upper()}}}"


def uncovered(word: str, letters: str) -> str:
    """uncovered("SEE", "EX") -> "_EE"."""
    return "".join([letter if letter in letters else "_" for letter in word])


def most_informative(rng: random.Random, secrets: Sequence[str], tried: str) -> str:
    """The letter after which the fewest words are left on average.

    BAT, CAT, TEA: B, C, E, A and T all separate one word from the other two. Of such letters the one
    that the fewest words lack, A or T, because a hit is paid.
    """
    sampled = rng.sample(secrets, min(len(secrets), MAX_SECRETS))
    letters = [letter for letter in ALPHABET if letter not in tried]
    rng.shuffle(letters)

    def left_over(letter: str) -> tuple[int, int]:
        groups = Counter([uncovered(word, letter) for word in sampled])
        hidden = groups["_" * len(sampled[0])]
        return sum(size * size for size in groups.values()), hidden

    return min(letters, key=left_over)


@lru_cache(64)
def header(word_length: int) -> str:
    return " ".join(f"C{place:02}" for place in range(word_length))
