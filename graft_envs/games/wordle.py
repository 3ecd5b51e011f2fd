"""Find a secret word; every letter of a guess is marked green, yellow or absent."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from graft_envs.games import words
from graft_envs.games.base import Game, MoveResult, echo, invalid

MAX_GUESSES, MAX_SECRETS = 30, 90
"""The teacher compares MAX_GUESSES possible secrets and as many other words, by MAX_SECRETS secrets."""


class Wordle(Game):
    """A place that turns green for the first time pays 0.5 / word_length, the word another 0.5.

    Secret ABBEY: the guess BABES is marked YYGGX and pays 0.2; then ABBEY pays 0.8. Secrets are
    common words; with `only_real_words` every guess must be in the dictionary.
    """

    pattern = re.compile(r"\\boxed\{\s*+([A-Za-z][A-Za-z\s]*+)\}", re.ASCII)
    SIZES = ((3, 15), (4, 20), (5, 25))  # word_length, max_turns
    saved = (*Game.saved, "word_length", "tried", "greens")
    word_length: int

    def __init__(
        self,
        *,
        word_length: int | None = 5,
        max_turns: int | None = 15,
        only_real_words: bool = False,
    ) -> None:
        super().__init__(max_turns, word_length=word_length)
        self.only_real_words = only_real_words
        words.check_length(self.word_length, words.basic())
        self.tried: list[str] = []
        self.greens: list[int] = []

    def draw_instance(self) -> None:
        self.answer = self.rng.choice(words.basic(self.word_length)).upper()
        self.tried = []
        self.greens = []

    def rules(self) -> str:
        real = " Only words of the dictionary are accepted." if self.only_real_words else ""
        return (
            f"Find a secret English word of {self.word_length} letters. Every letter of a guess is "
            "marked: G if it is in its right place, Y if it is elsewhere in the word, X if it is not "
            f"in the word (or not that often).{real}\n"
            f"You have {self.max_turns} turns. Write each guess as \\boxed{{WORD}}, for example "
            f"\\boxed{{{words.basic(self.word_length)[0].upper()}}}. What happened so far is shown to "
            "you."
        )

    def board(self) -> str:
        return "Your next guess:"

    def move(self, letters: str) -> MoveResult:
        guess = "".join(letters.split()).upper()
        if len(guess) != self.word_length:
            why = f"{echo(guess)} has {len(guess)} letters, the secret word {self.word_length}."
            return invalid(why)
        if guess in self.tried:
            return invalid(f"{guess} was tried before.")
        if self.only_real_words and guess.lower() not in words.dictionary(self.word_length):
            return invalid(f"{guess} is not in the dictionary.")
        self.tried.append(guess)
        if guess == self.answer:
            return f"{guess}. That is the secret word.", self.earn(1.0), True
        shown = marks(guess, self.answer)
        reward = 0.0
        if "G" in shown:
            new = [p for p, mark in enumerate(shown) if mark == "G" and p not in self.greens]
            if new:
                self.greens += new
                reward = self.earn(0.5 * len(self.greens) / self.word_length)
        return f"{guess} is marked {shown}.", reward, False

    def teacher_moves(self, rng: random.Random) -> Iterator[str]:
        """The word whose marks narrow the secrets down most, while several agree with all marks."""
        every = [word.upper() for word in words.basic(self.word_length)]
        left = every
        for guess in self.tried:
            left = self.agreeing(left, guess)
        while True:
            guess = most_informative(rng, left, every)
            yield guess
            left = self.agreeing(left, guess)

    def agreeing(self, secrets: Sequence[str], guess: str) -> list[str]:
        shown = marks(guess, self.answer)
        return [word for word in secrets if marks(guess, word) == shown and word != guess]

    def sample_random_action(self) -> str:
        return f"\\boxed{{{self.action_rng().choice(words.basic(self.word_length)).upper()}}}"


def most_informative(rng: random.Random, secrets: Sequence[str], every: Sequence[str]) -> str:
    """Choose among some words the one after which the fewest secrets are left on average.

    Secrets BAT, CAT, HAT: BAT only tests for BAT, but HUB, marked XXY, XXX or GXX, separates all three.
    Of two equally good words a possible secret comes first.
    """
    guesses = rng.sample(secrets, min(len(secrets), MAX_GUESSES))
    guesses += rng.sample(every, min(len(every), MAX_GUESSES))
    sampled = rng.sample(secrets, min(len(secrets), MAX_SECRETS))

    def left_over(guess: str) -> int:
        groups = Counter([marks(guess, secret) for secret in sampled if secret != guess])
        return sum(size * size for size in groups.values())

    return min(guesses, key=left_over)


def marks(guess: str, secret: str) -> str:
    """G in its place, Y elsewhere in the word, X absent: marks("BABES", "ABBEY") -> "YYGGX".

    A letter of the secret matches one of the guess, green ones first: marks("LLAMA", "LABEL")
    -> "GYYXX", the second A of the guess has no partner left.
    """
    pairs = list(zip(guess, secret, strict=True))
    left = [right for letter, right in pairs if letter != right]
    shown = ""
    for letter, right in pairs:
        if letter == right:
            shown += "G"
        elif letter in left:
            left.remove(letter)
            shown += "Y"
        else:
            shown += "X"
    return shown
