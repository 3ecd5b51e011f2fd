"""Fill a grid so that every row, column and box holds every digit once."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import lru_cache
from math import isqrt

from graft_envs.games.base import Game, MoveResult, echo, invalid, whole
from graft_envs.games.sudoku_grids import dig, full_grid, is_forced, missing_digits, shape

EMPTY = "."


class Sudoku(Game):
    """Each right digit pays its share of the cells that were empty; a wrong one is invalid.

    `clues` (GEM's name) is the number of attempts to empty a cell. A cell stays empty only if the
    puzzle keeps one solution, so 50 attempts leave 43 to 50 empty cells.
    """

    pattern = re.compile(r"\\boxed\{\s*+(\d++)\s++(\d++)\s++(\d++)\s*+\}", re.ASCII)
    SIZES = ((4, 10, 15), (9, 50, 50))  # scale, clues, max_turns
    saved = (*Game.saved, "scale", "cells", "num_holes", "num_filled")
    scale: int
    clues: int

    def __init__(
        self, *, scale: int | None = 9, clues: int | None = 50, max_turns: int | None = 50
    ) -> None:
        super().__init__(max_turns, scale=scale, clues=clues)
        for size, attempts, _ in self.sizes:
            if size not in (4, 9):
                raise ValueError(f"{scale=}: must be 4 or 9")
            if not 1 <= attempts <= size * size:
                raise ValueError(f"{clues=}: must be from 1 to {size * size}")
        self.cells: list[str] = []
        self.num_holes = 1
        self.num_filled = 0

    def draw_instance(self) -> None:
        rng = random.Random(self.rng.getrandbits(64))  # many draws: the fast generator
        grid = full_grid(self.scale, rng)
        puzzle = dig(grid, self.clues, rng)
        digits = "".join(str(bit.bit_length() - 1) for bit in grid)
        self.answer = [digits[at : at + self.scale] for at in range(0, len(digits), self.scale)]
        self.cells = [digit if bit else EMPTY for digit, bit in zip(digits, puzzle, strict=True)]
        self.num_holes = puzzle.count(0)
        self.num_filled = 0

    def rules(self) -> str:
        scale, side = self.scale, isqrt(self.scale)
        return (
            f"Sudoku on {scale} rows and {scale} columns, both counted from 1. Fill the empty cells "
            f"(shown as {EMPTY}) so that every row, every column and every box of {side} x {side} "
            f"cells holds each digit from 1 to {scale} once. Cells that hold a digit cannot be "
            "changed, and a wrong digit is not entered.\n"
            f"You have {self.max_turns} turns. Write each move as \\boxed{{row column digit}}, for "
            f"example \\boxed{{1 {scale} 3}}. What happened so far is shown to you."
        )

    def board(self) -> str:
        return layout(self.scale) % tuple(self.cells)

    def move(self, row_digits: str, col_digits: str, value_digits: str) -> MoveResult:
        row, col, value = whole(row_digits), whole(col_digits), whole(value_digits)
        if not (1 <= row <= self.scale and 1 <= col <= self.scale and 1 <= value <= self.scale):
            shown = f"{echo(row_digits)} {echo(col_digits)} {echo(value_digits)}"
            return invalid(f"{shown}: row, column and digit must be from 1 to {self.scale}.")
        cell = (row - 1) * self.scale + col - 1
        if self.cells[cell] != EMPTY:
            return invalid(f"{row} {col} {value}: this cell holds a {self.cells[cell]} already.")
        if self.answer[row - 1][col - 1] != str(value):
            return invalid(f"{row} {col} {value}: this digit does not belong there.")
        self.cells[cell] = str(value)
        self.num_filled += 1
        reward = self.earn(self.num_filled / self.num_holes)
        if self.num_filled == self.num_holes:
            return f"{row} {col} {value}. Right, and the grid is complete.", reward, True
        return f"{row} {col} {value}. Right.", reward, False

    def teacher_moves(self, rng: random.Random) -> Iterator[str]:
        """A cell whose digit is forced, if there is one, else any cell.

        The digits are those of `answer`, the only solution.
        """
        of = shape(self.scale)
        solution = [1 << int(digit) for digit in "".join(self.answer)]
        while True:
            empty = [cell for cell, shown in enumerate(self.cells) if shown == EMPTY]
            grid = [0 if shown == EMPTY else 1 << int(shown) for shown in self.cells]
            missing = missing_digits(of, grid)
            rng.shuffle(empty)
            forced = (at for at in empty if is_forced(of, grid, missing, at, solution[at]))
            cell = next(forced, empty[0])
            row, col = divmod(cell, self.scale)
            yield f"{row + 1} {col + 1} {self.answer[row][col]}"

    def sample_random_action(self) -> str:
        rng = self.action_rng()
        empty = [cell for cell, shown in enumerate(self.cells) if shown == EMPTY]
        row, col = divmod(rng.choice(empty) if empty else 0, self.scale)
        return f"\\boxed{{{row + 1} {col + 1} {rng.randint(1, self.scale)}}}"


@lru_cache(2)
def layout(scale: int) -> str:
    """The board with a %s for every cell.

        C1 C2   C3 C4
    R1   .  1 |  .  .
    """
    side = isqrt(scale)
    names = [f"C{col}" for col in range(1, scale + 1)]
    lines = ["   " + "   ".join(" ".join(names[at : at + side]) for at in range(0, scale, side))]
    row = " | ".join([" ".join([" %s"] * side)] * side)
    bar = "-" * (3 * side - 1)
    for number in range(1, scale + 1):
        lines.append(f"R{number} {row}")
        if number % side == 0 and number < scale:
            lines.append("   " + "-+-".join([bar] * side))
    return "The board:\n" + "\n".join(lines) + "\nYour next move:"
