"""A sudoku in one answer:   #### [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]]

EARL trains on grids of 6 x 6 with boxes of 2 x 3 cells and tests on 4 x 4.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import isqrt
from typing import Any

from graft.envs.base import BaseEnv, Trace
from graft.envs.splits import check_split, split_of
from graft.rewards.sources import grade_by_source
from graft.types import Author, Turn
from graft_envs.earl.marked import MAX_TRIES
from graft_envs.games.sudoku_grids import dig, full_grid

Board = list[list[int | None]]


class SudokuBoard(BaseEnv):
    """One turn: 1.0 if the grid after "####" is the solution, else 0.0.

    `scale` is the number of rows, 4, 6 or 9; `empty` the least and the largest share of empty cells.
    A cell is emptied only if one solution remains, so a puzzle may have fewer empty cells than drawn.
    The original does not check this, and refuses other solutions of an ambiguous puzzle.
    """

    env_id = "sudoku-board"
    saved = (*BaseEnv.saved, "board")

    def __init__(
        self, *, scale: int = 6, empty: Sequence[float] = (0.1, 0.7), split: str = "train"
    ) -> None:
        super().__init__()
        if scale not in (4, 6, 9):
            raise ValueError(f"scale={scale}: must be 4, 6 or 9")
        if len(empty) != 2 or not 0.0 < empty[0] <= empty[1] < 1.0:
            raise ValueError(
                f"empty={empty!r}: must be two shares (low, high) with 0 < low <= high < 1"
            )
        self.scale = scale
        self.empty = empty[0], empty[1]
        self.split = check_split(split)
        self.board: Board = []

    def pose(self) -> str:
        draws = random.Random(self.rng.getrandbits(64))  # many draws: the fast generator
        for _ in range(MAX_TRIES):
            share = draws.uniform(*self.empty)
            grid = full_grid(self.scale, draws)
            puzzle = dig(grid, max(1, int(share * len(grid))), draws)
            self.board = [[digit or None for digit in row] for row in rows(puzzle, self.scale)]
            if split_of(str(self.board)) == self.split:
                break
        else:
            raise ValueError(f"no {self.split} sudoku with empty={self.empty}; allow more")
        self.answer = str(rows(grid, self.scale))
        height = isqrt(self.scale)
        width = self.scale // height
        return (
            f"Solve this sudoku of {self.scale} rows and {self.scale} columns: replace every None so that "
            f"each row, each column and each box of {height} x {width} cells (rows x columns) holds the "
            f"digits 1 to {self.scale} once.\n{self.board}\n"
            "Write the whole grid after ####, in the same form and with no text behind it; two rows of two "
            "digits would be: #### [[1, 2], [2, 1]]"
        )

    def respond(self, action: str) -> Turn:
        reward = grade_by_source("calc_bench", action, self.answer, {"task": "sudoku"}) or 0.0
        return Turn(reward=reward, terminated=True, info={"is_right": reward == 1.0})

    @property
    def expression(self) -> str:
        return self.answer

    def demonstrate(self, rng: random.Random) -> Trace:
        return [(Author.POLICY, f"#### {self.answer}")]

    def describe(self) -> dict[str, Any]:
        return {"board": self.board}

    def sample_random_action(self) -> str:
        rng = self.action_rng()
        digits = range(1, self.scale + 1)
        return f"#### {[[cell or rng.choice(digits) for cell in row] for row in self.board]}"


def rows(grid: Sequence[int], scale: int) -> list[list[int]]:
    """Bits as rows of digits; an empty cell is 0."""
    digits = [max(0, bit.bit_length() - 1) for bit in grid]
    return [digits[at : at + scale] for at in range(0, len(digits), scale)]
