"""Find hidden words in a grid of letters by naming the cells where they begin and end."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from functools import cache
from string import ascii_uppercase

import graft_envs.games.words as word_lists
from graft_envs.games.base import Game, MoveResult, echo, invalid, whole
from graft_envs.games.word_grid import BLANK, PlacedWord, draw, get, lay_out, put

MIN_LETTERS, MAX_LETTERS = 3, 12
"""Shorter words occur by chance; longer ones make large grids."""


class WordSearch(Game):
    """Every word found pays its share; all words together 1.0.

    The words are not listed. A word counts once, its ends in either order, and only where it was hidden:
    the random letters may form words too. With hardcore=None one of the two
    word lists is drawn with each instance.
    """

    pattern = re.compile(
        r"\\boxed\{\s{0,9}(\d+)\s{1,9}(\d+)\s{1,9}(\d+)\s{1,9}(\d+)\s{0,9}\}", re.ASCII
    )
    saved = (*Game.saved, "lines", "side", "hidden", "found", "tried", "hardcore")

    def __init__(
        self,
        *,
        hardcore: bool | None = False,
        num_words: int | None = 5,
        max_turns: int | None = 20,
    ) -> None:
        super().__init__(max_turns)
        self.is_random = hardcore is None
        self.hardcore = hardcore
        self.num_words = 5 if num_words is None else num_words
        self.max_turns = 20 if max_turns is None else max_turns
        if not 1 <= self.num_words <= self.max_turns:
            raise ValueError(
                f"num_words={num_words}: must lie between 1 and max_turns={self.max_turns}; "
                "a turn finds one word"
            )
        self.lines: list[str] = []  # the grid as shown, found words in brackets
        self.side = 0
        self.hidden: dict[str, str] = {}  # "first row, first column, last row, last column" -> word
        self.found: list[str] = []
        self.tried: list[str] = []

    def draw_instance(self) -> None:
        if self.is_random:
            self.hardcore = self.rng.random() < 0.5
        rows, placed = lay_out(self.rng, candidates(hardcore=bool(self.hardcore)), self.num_words)
        self.lines, self.side = draw(fill(self.rng, rows)), len(rows)
        self.hidden = {format_ends(place): place.word for place in placed}
        self.answer = {word: where for where, word in self.hidden.items()}
        self.found, self.tried = [], []

    def rules(self) -> str:
        return (
            f"Words are hidden in a grid of letters, {self.num_words} in all, each written across "
            f"(left to right) or down (top to bottom) and {MIN_LETTERS} to {MAX_LETTERS} letters "
            "long. Which words they are is not said. Found words are shown in [brackets]; rows and "
            "columns count from 0.\n"
            f"You have {self.max_turns} turns. Name the first and the last cell of a word as "
            "\\boxed{row column row column}, for example \\boxed{1 1 1 5} for row 1, columns 1 to "
            "5. What happened so far is shown to you."
        )

    def board(self) -> str:
        grid = "\n".join(self.lines)
        return f"Grid:\n{grid}\nFound: {len(self.found)} of {len(self.hidden)}\nYour next guess:"

    def move(self, *digits: str) -> MoveResult:
        row, col, last_row, last_col = map(whole, digits)
        if max(row, col, last_row, last_col) >= self.side:
            shown = " ".join(map(echo, digits))
            return invalid(f"{shown} is outside the grid of {self.side} x {self.side} cells.")
        if (row, col) > (last_row, last_col):
            row, col, last_row, last_col = last_row, last_col, row, col
        where = f"{row} {col} {last_row} {last_col}"
        if where in self.tried:
            return invalid(f"{where} was tried before.")
        self.tried.append(where)
        if row != last_row and col != last_col:
            return invalid(f"{where} is neither one row nor one column.")
        word = self.hidden.get(where)
        if word is None:
            return f"No hidden word at {where}.", 0.0, False
        self.found.append(word)
        for r in range(row, last_row + 1):
            for c in range(col, last_col + 1):
                put(self.lines, r, c, f"[{get(self.lines, r, c)}]")
        reward = self.earn(len(self.found) / len(self.hidden))
        if len(self.found) == len(self.hidden):
            return f"{word} at {where}: all words are found.", reward, True
        return f"{word} at {where} is one of the words.", reward, False

    def teacher_moves(self, rng: random.Random) -> Iterator[str]:
        """The hidden words, longest first, as a person would find them."""
        for where, word in sorted(self.hidden.items(), key=lambda item: -len(item[1])):
            if word not in self.found:
                yield where

    def sample_random_action(self) -> str:
        """Two cells of one row or column."""
        rng = self.action_rng()
        line, first, last = (rng.randrange(self.side or 1) for _ in range(3))
        if rng.random() < 0.5:
            return f"\\boxed{{{line} {first} {line} {last}}}"
        return f"\\boxed{{{first} {line} {last} {line}}}"


def fill(rng: random.Random, rows: Sequence[str]) -> list[str]:
    """The rows with a random letter for every blank."""
    fast = random.Random(rng.getrandbits(64))
    letters = iter(fast.choices(ascii_uppercase, k=sum(row.count(BLANK) for row in rows)))
    return ["".join([next(letters) if c == BLANK else c for c in row]) for row in rows]


def format_ends(place: PlacedWord) -> str:
    """PlacedWord("CAT", 2, 5, "down") -> "2 5 4 5"."""
    row, col = place.cells()[-1]
    return f"{place.row} {place.col} {row} {col}"


@cache
def candidates(*, hardcore: bool) -> tuple[str, ...]:
    """The words that may be hidden, upper-case."""
    pool = word_lists.full() if hardcore else word_lists.basic()
    return tuple(word.upper() for word in pool if MIN_LETTERS <= len(word) <= MAX_LETTERS)
