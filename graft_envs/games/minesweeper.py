"""Uncover every cell without a mine; the numbers count the mines next to a cell."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import lru_cache

from graft_envs.games.base import Game, MoveResult, echo, invalid, whole
from graft_envs.games.solvers.minesweeper import risks

HIDDEN, FLAG, MINE = ".", "F", -1


class Minesweeper(Game):
    """Each uncovered cell pays its share of the safe cells; uncovering all of them wins.

    Mines are placed at the first reveal, outside the 3x3 block around it (if they do not fit
    there, in the block too, but never in the cell itself). With `strict_flags` the game is won
    only by a reveal after which all mines are flagged as well; the rewards are the same.
    """

    pattern = re.compile(r"\\boxed\{\s*+([A-Za-z]++)\s++(\d++)\s++(\d++)\s*+\}", re.ASCII)
    # rows, cols, num_mines, max_turns
    SIZES = tuple((n, n, n * n // 5, n * n) for n in range(5, 9))
    saved = (*Game.saved, "rows", "cols", "num_mines", "field", "cells", "num_open")
    rows: int
    cols: int
    num_mines: int

    def __init__(
        self,
        *,
        rows: int | None = 8,
        cols: int | None = 8,
        num_mines: int | None = 10,
        max_turns: int | None = 100,
        strict_flags: bool = False,
    ) -> None:
        super().__init__(max_turns, rows=rows, cols=cols, num_mines=num_mines)
        if min(self.rows, self.cols) < 1:
            raise ValueError(f"{rows=} and {cols=} must be 1 or more")
        if not 1 <= self.num_mines < self.rows * self.cols:
            raise ValueError(
                f"{num_mines=}: a board of {self.rows} x {self.cols} cells takes 1 to "
                f"{self.rows * self.cols - 1} mines, so that one cell is safe"
            )
        self.strict_flags = strict_flags
        self.field: list[int] = []
        """Per cell the number of mines around it, or MINE; empty before the first reveal."""
        self.cells: list[str] = []
        """What the player sees of each cell."""
        self.num_open = 0

    def draw_instance(self) -> None:
        self.field = []
        self.cells = [HIDDEN] * (self.rows * self.cols)
        self.num_open = 0

    def rules(self) -> str:
        rows, cols = self.rows, self.cols
        return (
            f"Minesweeper on {rows} rows and {cols} columns, both counted from 0, with {self.num_mines} "
            "mines. Open every cell that has no mine. On the board a dot is a hidden cell, a digit the "
            "number of mines in the 8 cells around an open one, F a flag. The first cell you open is "
            "never a mine; opening a mine ends the game. You cannot open a cell that is open or "
            "flagged.\n"
            f"You have {self.max_turns} turns. Write each move as \\boxed{{reveal row column}} to open a "
            "cell, or \\boxed{flag row column} to set a flag or take it away, for example "
            f"\\boxed{{reveal {rows // 2} {cols // 2}}} or \\boxed{{flag 0 {cols - 1}}}. What "
            "happened so far is shown to you."
        )

    def board(self) -> str:
        return layout(self.rows, self.cols) % tuple(self.cells)

    def move(self, verb: str, row_digits: str, col_digits: str) -> MoveResult:
        row, col, verb = whole(row_digits), whole(col_digits), verb.lower()
        if row >= self.rows or col >= self.cols:
            where = f"{echo(row_digits)} {echo(col_digits)}"
            return invalid(
                f"{where} is off the board: rows are 0 to {self.rows - 1}, columns 0 to "
                f"{self.cols - 1}."
            )
        if verb == "reveal":
            return self.reveal(row * self.cols + col)
        if verb == "flag":
            return self.flag(row * self.cols + col)
        return invalid(f"{echo(verb)} is not a move; there are reveal and flag.")

    def reveal(self, cell: int) -> MoveResult:
        done = f"reveal {self.where(cell)}"
        # before the flag is checked: flags do not protect from mines
        if self.field and self.field[cell] == MINE:
            return f"{done}. That was a mine; the game is over.", 0.0, True
        if self.cells[cell] != HIDDEN:
            state = "flagged" if self.cells[cell] == FLAG else "open"
            return invalid(f"{done}: this cell is {state}.")
        if not self.field:
            self.place_mines(cell)
        num_new = self.open(cell)
        self.num_open += num_new
        num_safe = self.rows * self.cols - self.num_mines
        reward = self.earn(self.num_open / num_safe)
        if self.num_open == num_safe and not (self.strict_flags and HIDDEN in self.cells):
            return f"{done}. Every safe cell is open: the board is won.", reward, True
        cells = "cell" if num_new == 1 else "cells"
        return f"{done}. {num_new} {cells} opened.", reward, False

    def flag(self, cell: int) -> MoveResult:
        done = f"flag {self.where(cell)}"
        if self.cells[cell] == HIDDEN:
            self.cells[cell] = FLAG
            return f"{done}. A flag was set.", 0.0, False
        if self.cells[cell] == FLAG:
            self.cells[cell] = HIDDEN
            return f"{done}. The flag was taken away.", 0.0, False
        return invalid(f"{done}: this cell is open.")

    def place_mines(self, first: int) -> None:
        around = neighbours(self.rows, self.cols)
        block = {first, *around[first]}
        free = [cell for cell in range(len(self.cells)) if cell not in block]
        mines = self.rng.sample(free, min(self.num_mines, len(free)))
        mines += self.rng.sample(around[first], self.num_mines - len(mines))
        self.field = [0] * len(self.cells)
        for mine in mines:
            for cell in around[mine]:
                self.field[cell] += 1
        for mine in mines:
            self.field[mine] = MINE

    def open(self, cell: int) -> int:
        """Uncover a safe cell and, around cells without neighbouring mines, their neighbours; how many."""
        around, field, cells = neighbours(self.rows, self.cols), self.field, self.cells
        cells[cell] = str(field[cell])
        num_new = 1
        spreading = [] if field[cell] else [cell]
        while spreading:
            for other in around[spreading.pop()]:
                if cells[other] == HIDDEN:
                    cells[other] = str(field[other])
                    num_new += 1
                    if not field[other]:
                        spreading.append(other)
        return num_new

    def teacher_moves(self, rng: random.Random) -> Iterator[str]:
        """Safe cells while the digits show any, else the cell that is least likely a mine."""
        around = neighbours(self.rows, self.cols)
        num_safe = len(self.cells) - self.num_mines
        if not self.field:
            # most cells open where a cell has most neighbours and the mines fit elsewhere
            reach = [len(others) if len(others) < num_safe else 0 for others in around]
            most = max(reach)
            best = [cell for cell, opened in enumerate(reach) if opened == most]
            yield f"reveal {self.where(rng.choice(best))}"
        while self.num_open < num_safe:
            chances = risks(self.cells, around, self.num_mines)
            for cell in sorted(cell for cell, risk in chances.items() if risk == 1.0):
                if self.strict_flags and self.cells[cell] == HIDDEN:
                    yield f"flag {self.where(cell)}"
            least = min(chances.values())
            best = [cell for cell, risk in chances.items() if risk == least]
            safe = sorted(best) if least == 0.0 else [rng.choice(best)]
            for cell in safe:
                if self.cells[cell] == FLAG:
                    yield f"flag {self.where(cell)}"
                if self.cells[cell] == HIDDEN:  # an earlier one may have opened it
                    yield f"reveal {self.where(cell)}"

    def where(self, cell: int) -> str:
        return f"{cell // self.cols} {cell % self.cols}"

    def sample_random_action(self) -> str:
        rng = self.action_rng()
        hidden = [cell for cell, shown in enumerate(self.cells) if shown == HIDDEN]
        cell = rng.choice(hidden) if hidden else 0
        return f"\\boxed{{{'flag' if rng.random() < 0.1 else 'reveal'} {self.where(cell)}}}"


@lru_cache(64)
def neighbours(rows: int, cols: int) -> tuple[tuple[int, ...], ...]:
    """The up to 8 cells around each cell, cells counted row by row."""
    return tuple(
        tuple(
            r * cols + c
            for r in range(max(row - 1, 0), min(row + 2, rows))
            for c in range(max(col - 1, 0), min(col + 2, cols))
            if (r, c) != (row, col)
        )
        for row in range(rows)
        for col in range(cols)
    )


@lru_cache(64)
def layout(rows: int, cols: int) -> str:
    """The board with a %s for every cell."""
    lines = ["   " + "".join(f"{col:>3}" for col in range(cols))]
    lines += [f"{row:>3}" + "  %s" * cols for row in range(rows)]
    return "The board:\n" + "\n".join(lines) + "\nYour next move:"
