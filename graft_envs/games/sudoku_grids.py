"""Sudoku grids: a random full one, and puzzles made from it that have exactly one solution.

Cells are numbered row by row. Digits are bits (digit d is 1 << d), so that the digits that a row, a
column and a box all lack are one `&`, and the search always continues at the cell with the fewest
digits left.
"""

from __future__ import annotations

import random
from functools import cache
from math import isqrt
from typing import NamedTuple


class SudokuShape(NamedTuple):
    """Which row, column and box a cell is in, as indices into one list of units."""

    scale: int
    units: tuple[tuple[int, int, int], ...]
    """Per cell its row, scale + its column, 2 * scale + its box."""
    members: tuple[tuple[int, ...], ...]
    """Per unit its cells."""
    every: int
    """All digits."""
    digits: tuple[tuple[int, ...], ...]
    """Per set of digits the bits in it: digits[0b110] -> (0b10, 0b100)."""


@cache
def shape(scale: int) -> SudokuShape:
    """The layout of a grid with `scale` rows: 4 or 9 with square boxes, 6 with boxes of 2 x 3 cells."""
    height = isqrt(scale)
    width = scale // height
    units = tuple(
        (row, scale + col, 2 * scale + row // height * height + col // width)
        for row in range(scale)
        for col in range(scale)
    )
    members = tuple(
        tuple(cell for cell, of in enumerate(units) if unit in of) for unit in range(3 * scale)
    )
    every = (1 << scale + 1) - 2
    bits = tuple(1 << digit for digit in range(1, scale + 1))
    digits = tuple(tuple(bit for bit in bits if bit & some) for some in range(every + 1))
    return SudokuShape(scale, units, members, every, digits)


def full_grid(scale: int, rng: random.Random) -> list[int]:
    """A random valid grid, as bits."""
    of = shape(scale)
    grid = [0] * (scale * scale)
    missing = [of.every] * (3 * scale)
    # the first row is any order of the digits; then cells are tried with digits in random order
    first = list(of.digits[of.every])
    rng.shuffle(first)
    for cell, bit in enumerate(first):
        _place(of, grid, missing, cell, bit)
    solved = _search(of, grid, missing, list(range(scale, scale * scale)), rng)
    assert solved, "every first row can be completed"
    return grid


def dig(grid: list[int], attempts: int, rng: random.Random) -> list[int]:
    """Empty up to `attempts` cells, in random order, each only if one solution remains.

    `grid` is full and stays as it is; in the puzzle an empty cell is 0.
    """
    of = shape(isqrt(len(grid)))
    puzzle = grid.copy()
    missing = [0] * (3 * of.scale)
    empty: list[int] = []
    for cell in rng.sample(range(len(grid)), attempts):
        bit = puzzle[cell]
        puzzle[cell] = 0
        for unit in of.units[cell]:
            missing[unit] |= bit
        if is_forced(of, puzzle, missing, cell, bit) or not _has_other(
            of, puzzle, missing, empty, cell, bit
        ):
            empty.append(cell)
        else:
            _place(of, puzzle, missing, cell, bit)
    return puzzle


def _place(of: SudokuShape, grid: list[int], missing: list[int], cell: int, bit: int) -> None:
    grid[cell] = bit
    for unit in of.units[cell]:
        missing[unit] ^= bit


def missing_digits(of: SudokuShape, puzzle: list[int]) -> list[int]:
    """The digits that each unit does not hold yet."""
    return [of.every & ~sum(puzzle[cell] for cell in members) for members in of.members]


def is_forced(of: SudokuShape, puzzle: list[int], missing: list[int], cell: int, bit: int) -> bool:
    """Whether the digit is forced: no other fits here, or it fits nowhere else in a unit.

    Then emptying the cell adds no solution; this is much cheaper than a search.
    """
    units = of.units
    a, b, c = units[cell]
    if missing[a] & missing[b] & missing[c] == bit:
        return True
    for unit in (a, b, c):
        for other in of.members[unit]:
            if not puzzle[other] and other != cell:
                d, e, f = units[other]
                if missing[d] & missing[e] & missing[f] & bit:
                    break
        else:
            return True
    return False


def _has_other(
    of: SudokuShape, puzzle: list[int], missing: list[int], empty: list[int], cell: int, bit: int
) -> bool:
    """Whether the puzzle has a solution with another digit in `cell`."""
    a, b, c = of.units[cell]
    others = missing[a] & missing[b] & missing[c] & ~bit
    for other in of.digits[others]:
        trial = missing.copy()
        for unit in (a, b, c):
            trial[unit] ^= other
        if _search(of, puzzle.copy(), trial, empty.copy(), None):
            return True
    return False


def _tightest(of: SudokuShape, missing: list[int], empty: list[int]) -> tuple[int, int]:
    """The empty cell with the fewest digits left, and these digits; stops at one with at most one."""
    units = of.units
    best, tightest, left = 99, -1, 0
    for cell in empty:
        a, b, c = units[cell]
        choices = missing[a] & missing[b] & missing[c]
        count = choices.bit_count()
        if count < best:
            best, tightest, left = count, cell, choices
            if count < 2:
                break
    return tightest, left


def _search(
    of: SudokuShape,
    grid: list[int],
    missing: list[int],
    empty: list[int],
    rng: random.Random | None,
) -> bool:
    """Fill `grid` in place; whether that is possible. With `rng`, digits are tried in random order."""
    if not empty:
        return True
    cell, choices = _tightest(of, missing, empty)
    empty.remove(cell)
    a, b, c = of.units[cell]
    bits = of.digits[choices]
    if rng is not None and len(bits) > 1:
        bits = rng.sample(bits, len(bits))
    for bit in bits:
        missing[a] ^= bit
        missing[b] ^= bit
        missing[c] ^= bit
        if _search(of, grid, missing, empty, rng):
            grid[cell] = bit
            return True
        missing[a] ^= bit
        missing[b] ^= bit
        missing[c] ^= bit
    empty.append(cell)
    return False
