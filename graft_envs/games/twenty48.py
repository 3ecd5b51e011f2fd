"""2048: slide the board, equal tiles merge, a new tile appears."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

from graft_envs.games.base import Game, MoveResult, invalid

DIRECTIONS = ("up", "down", "left", "right")
EMPTY = "."
MAX_SIZE = 10  # rows of a board

LOST = -1000.0
EMPTY_CELL, PAIR, DISORDER = 3.0, 2.0, 1.0  # the teacher's weights for a line
MAX_CELLS = 8
"""Empty cells that the teacher tries a new tile on; a large board has a hundred."""


class Game2048(Game):
    """Progress towards the target tile, counted in doublings, 1.0 in all.

    Target 64, largest tile at the start 4: four doublings, so the first 8, 16, 32 and 64 pay 0.25
    each. A doubling by a new tile is paid with the next move. A board without a legal move ends the game.

    After t moves the tiles sum to at most 4 (t + 2). So 512 in 50 turns (-hard) and 2048 in 100
    (-extreme-hard) are out of reach: those games only pay for progress.
    """

    pattern = re.compile(r"\\boxed\{\s{0,9}(up|down|left|right)\s{0,9}\}", re.ASCII | re.IGNORECASE)
    SIZES = ((16, 20), (32, 30), (64, 50))  # target_tile, max_turns
    saved = (*Game.saved, "cells", "start", "best", "target_tile")
    target_tile: int

    def __init__(
        self, *, target_tile: int | None = 64, max_turns: int | None = 50, board_size: int = 4
    ) -> None:
        super().__init__(max_turns, target_tile=target_tile)
        if target_tile is not None and (target_tile < 8 or target_tile & (target_tile - 1)):
            raise ValueError(f"target_tile={target_tile}: must be a power of two, 8 or more")
        if not 2 <= board_size <= MAX_SIZE:
            raise ValueError(f"board_size={board_size}: must be from 2 to {MAX_SIZE}")
        self.size = board_size
        # A cell is a letter: "." empty, "a" the tile 2, "b" 4, "c" 8, ... A board is a string of
        # cells, row after row: it slices into rows and columns, and lines are keys of a cache.
        self.cells = ""
        self.start = self.best = 1  # exponents of the largest tile: at the start, so far

    def draw_instance(self) -> None:
        self.cells = EMPTY * self.size**2
        self.add_tile()
        self.add_tile()
        self.start = self.best = exponent(max(self.cells))
        self.answer = self.target_tile

    def add_tile(self) -> None:
        """A 2 on any empty cell, or a 4 one time in ten; a single draw decides both."""
        number, tenth = divmod(self.rng.randrange(10 * self.cells.count(EMPTY)), 10)
        at = -1
        for _ in range(number + 1):
            at = self.cells.find(EMPTY, at + 1)
        self.cells = f"{self.cells[:at]}{'a' if tenth else 'b'}{self.cells[at + 1 :]}"

    def rules(self) -> str:
        return (
            f"Play 2048 on a board of {self.size} by {self.size}. A move slides all tiles up, down, "
            "left or right; two equal tiles that meet become one of twice the value, each tile at "
            "most once per move. Then a new tile, 2 or 4, appears on an empty cell. The goal is the "
            f"tile {self.target_tile}; on the way every doubling of the largest tile is paid.\n"
            f"You have {self.max_turns} turns. Write each move as \\boxed{{direction}}, for example "
            "\\boxed{left}. What happened so far is shown to you."
        )

    def board(self) -> str:
        size, cells = self.size, self.cells
        rows = [drawn(cells[at : at + size]) for at in range(0, len(cells), size)]
        return "Board:\n" + "\n".join(rows) + "\nYour next move:"

    def move(self, direction: str) -> MoveResult:
        direction = direction.lower()
        moved = slide(self.cells, self.size, direction)
        if moved == self.cells:
            return invalid(f"{direction} does not change the board.")
        self.cells = moved
        reward = self.progress()
        self.add_tile()
        if 1 << self.best >= self.target_tile:
            return f"{direction}. There is the tile {self.target_tile}: you win.", reward, True
        if is_stuck(self.cells, self.size):
            return f"{direction}. No move is left; the game is over.", reward, True
        return f"{direction}.", reward, False

    def progress(self) -> float:
        """The reward of new doublings of the largest tile, as a share of those to the target."""
        goal = self.target_tile.bit_length() - 1
        largest = min(exponent(max(self.cells)), goal)
        if largest <= self.best:
            return 0.0
        self.best = largest
        return self.earn((largest - self.start) / (goal - self.start))

    def teacher_moves(self, rng: random.Random) -> Iterator[str]:
        """Plays well, not perfectly: looks at a move, any new tile and the best next move.

        It also plays for progress where the target is out of reach.
        """
        while True:
            boards = {way: slide(self.cells, self.size, way) for way in DIRECTIONS}
            legal = [way for way in DIRECTIONS if boards[way] != self.cells]
            rng.shuffle(legal)
            yield max(legal, key=lambda way: expected_value(boards[way], self.size))

    def sample_random_action(self) -> str:
        return f"\\boxed{{{self.action_rng().choice(DIRECTIONS)}}}"


def exponent(cell: str) -> int:
    """ "a" -> 1, as 2 = 2^1; "b" -> 2."""
    return ord(cell) - 96


def slide(cells: str, size: int, direction: str) -> str:
    """The whole board after a move: "a.a.", size 2, "down" -> "..b."."""
    to_end = direction in ("right", "down")
    if direction in ("left", "right"):
        return "".join(
            [slide_line(cells[at : at + size], to_end) for at in range(0, len(cells), size)]
        )
    columns = "".join([slide_line(cells[at::size], to_end) for at in range(size)])
    return "".join([columns[at::size] for at in range(size)])


@lru_cache(maxsize=1 << 16)  # a 4x4 board has a few thousand different lines
def slide_line(line: str, to_end: bool) -> str:
    """One line after a move: "aa.b" -> "bb..", never "c...": a tile merges once per move."""
    tiles = line.replace(EMPTY, "")
    merged: list[str] = []
    can_merge = False
    for tile in reversed(tiles) if to_end else tiles:
        can_merge = can_merge and merged[-1] == tile
        if can_merge:
            merged[-1] = chr(ord(tile) + 1)
            can_merge = False
        else:
            merged.append(tile)
            can_merge = True
    text = "".join(merged)
    return text[::-1].rjust(len(line), EMPTY) if to_end else text.ljust(len(line), EMPTY)


def expected_value(cells: str, size: int) -> float:
    """The average value of a board over the places of the next tile, taken to be a 2."""
    free = [at for at, cell in enumerate(cells) if cell == EMPTY]
    tried = free[:: -(-len(free) // MAX_CELLS)]
    total = 0.0
    for at in tried:
        board = f"{cells[:at]}a{cells[at + 1 :]}"
        answers = {slide(board, size, way) for way in DIRECTIONS} - {board}
        total += max([board_value(answer, size) for answer in answers], default=LOST)
    return total / len(tried)


def board_value(cells: str, size: int) -> float:
    rows = [cells[at : at + size] for at in range(0, len(cells), size)]
    columns = [cells[at::size] for at in range(size)]
    return sum(line_value(line) for line in (*rows, *columns))


@lru_cache(maxsize=1 << 16)
def line_value(line: str) -> float:
    """Empty cells, pairs that can merge, and order, which keeps large tiles at a border.

    "aab." -> 3 + 2 - 1: an empty cell, a pair, and one rise in a line that otherwise falls.
    """
    tiles = [0 if cell == EMPTY else exponent(cell) for cell in line]
    full = [tile for tile in tiles if tile]
    pairs = sum(one == other for one, other in pairwise(full))
    rise = sum(max(0, other - one) for one, other in pairwise(tiles))
    fall = sum(max(0, one - other) for one, other in pairwise(tiles))
    return EMPTY_CELL * tiles.count(0) + PAIR * pairs - DISORDER * min(rise, fall)


def is_stuck(cells: str, size: int) -> bool:
    if EMPTY in cells:
        return False
    return slide(cells, size, "left") == cells == slide(cells, size, "up")


@lru_cache(maxsize=1 << 16)
def drawn(row: str) -> str:
    """A row as shown, in cells of four characters: "a.b" -> "   2    .    4"."""
    return " ".join(f"{EMPTY if c == EMPTY else 1 << exponent(c):>4}" for c in row)
