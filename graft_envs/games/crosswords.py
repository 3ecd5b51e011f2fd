"""A crossword of a few words, filled in letter by letter."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from graft_envs.games.base import Game, MoveResult, echo, invalid, whole
from graft_envs.games.word_grid import BLANK, PlacedWord, count_letters, draw, get, lay_out, put

CLUES = Path(__file__).parent / "data" / "clues.jsonl"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
OPEN = "_"


class Crosswords(Game):
    """Every right letter pays its share; all letters together 1.0.

    "CAT" crossing "COT" has five cells: each pays 0.2. A wrong letter earns 0 and leaves the cell
    open. Grids have no more cells than the player has turns, so every one can be completed. The
    clues contain the first cell of their words: length and direction would not always be enough. With
    hardcore=None one of the two clue lists is drawn with each instance.
    """

    pattern = re.compile(r"\\boxed\{\s{0,9}(\d+)\s{1,9}(\d+)\s{1,9}([a-zA-Z])\s{0,9}\}", re.ASCII)
    saved = (
        *Game.saved,
        "solution",
        "lines",
        "clues",
        "words",
        "num_cells",
        "num_open",
        "hardcore",
    )

    def __init__(
        self,
        *,
        hardcore: bool | None = False,
        num_words: int | None = 3,
        max_turns: int | None = 30,
    ) -> None:
        super().__init__(max_turns)
        self.is_random = hardcore is None
        self.hardcore = hardcore
        self.num_words = 3 if num_words is None else num_words
        self.max_turns = 20 if max_turns is None else max_turns
        self.solution: list[str] = []
        self.lines: list[str] = []  # the grid as shown: the only record of the filled cells
        self.clues = ""
        self.words: list[PlacedWord] = []
        self.num_cells = self.num_open = 0
        if not 1 <= self.num_words <= len(clue_list(hardcore=bool(hardcore))):
            raise ValueError(f"num_words={num_words}: must lie between 1 and 50")

    def draw_instance(self) -> None:
        if self.is_random:
            self.hardcore = self.rng.random() < 0.5
        clues = clue_list(hardcore=bool(self.hardcore))
        self.solution, placed = lay_out(self.rng, tuple(clues), self.num_words, self.max_turns)
        self.answer = [place.word for place in placed]
        self.words = placed
        self.clues = "\n".join(
            f"{number}. From row {place.row}, column {place.col}, {place.direction}, "
            f"{len(place.word)} letters: {clues[place.word]}"
            for number, place in enumerate(placed, 1)
        )
        self.lines = draw([re.sub(r"\w", OPEN, row) for row in self.solution])
        self.num_cells = self.num_open = count_letters(self.solution)

    def rules(self) -> str:
        return (
            f"Solve a crossword, one letter per turn. In the grid {OPEN} is a cell to fill and "
            f"{BLANK} is black; rows and columns count from 0. A wrong letter is not written in.\n"
            f"You have {self.max_turns} turns for {self.num_cells} cells. Write each letter as "
            "\\boxed{row column letter}, for example \\boxed{0 3 E}. What happened so far is shown "
            "to you."
        )

    def board(self) -> str:
        grid = "\n".join(self.lines)
        return f"Grid:\n{grid}\nClues:\n{self.clues}\nYour next letter:"

    def move(self, row_digits: str, col_digits: str, letter: str) -> MoveResult:
        row, col, letter = whole(row_digits), whole(col_digits), letter.upper()
        side = len(self.solution)
        if row >= side or col >= side:
            where = f"row {echo(row_digits)}, column {echo(col_digits)}"
            return invalid(f"{letter} at {where} is outside the grid of {side} x {side} cells.")
        right = self.solution[row][col]
        if right == BLANK:
            return invalid(f"{letter} at row {row}, column {col}: this cell is black.")
        if get(self.lines, row, col) != OPEN:
            return invalid(f"{letter} at row {row}, column {col}: this cell is filled already.")
        if letter != right:
            return f"{letter} at row {row}, column {col} is wrong.", 0.0, False
        put(self.lines, row, col, letter)
        self.num_open -= 1
        reward = self.earn((self.num_cells - self.num_open) / self.num_cells)
        if not self.num_open:
            return f"{letter} at row {row}, column {col} completes the crossword.", reward, True
        return f"{letter} at row {row}, column {col} is right.", reward, False

    def teacher_moves(self, rng: random.Random) -> Iterator[str]:
        """Fills in the known words one after the other, in a random order of the clues."""
        for place in rng.sample(self.words, len(self.words)):
            for (row, col), letter in zip(PlacedWord(*place).cells(), place[0], strict=True):
                if get(self.lines, row, col) == OPEN:
                    yield f"{row} {col} {letter}"

    def sample_random_action(self) -> str:
        """Any letter for any open cell."""
        rng = self.action_rng()
        number = rng.randrange(max(1, self.num_open))
        cells = [
            (row, col)
            for row, text in enumerate(self.solution)
            for col in range(len(text))
            if get(self.lines, row, col) == OPEN
        ]
        row, col = cells[number] if cells else (0, 0)
        return f"\\boxed{{{row} {col} {rng.choice(LETTERS)}}}"


@cache
def clue_list(*, hardcore: bool) -> dict[str, str]:
    """Word -> clue, of the easy or the hard list."""
    rows = [json.loads(line) for line in CLUES.read_text("utf-8").splitlines()]
    return {row["word"].upper(): row["clue"] for row in rows if row["hardcore"] == hardcore}
