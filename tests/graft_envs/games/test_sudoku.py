"""Sudoku: full grids, puzzles with one solution, pay per right digit."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from graft.envs import make
from graft_envs.games.sudoku_grids import dig, full_grid, shape

SQUARE = ["1234", "3412", "2143", "4321"]


def put(cells: str, answer: list[str], **kwargs: Any) -> Any:
    env = make("game:Sudoku-v0-easy", **kwargs)
    env.reset(seed=0)
    env.cells, env.answer, env.num_holes = list(cells), answer, cells.count(".")
    return env


def solutions(rows: list[str], limit: int = 2) -> list[list[str]]:
    """All fillings, found the slow and obvious way: the next empty cell, every digit."""
    scale = len(rows)
    side = int(scale**0.5)
    grid = [list(row) for row in rows]
    found: list[list[str]] = []

    def fits(row: int, col: int, digit: str) -> bool:
        top, left = row // side * side, col // side * side
        return (
            digit not in grid[row]
            and all(grid[r][col] != digit for r in range(scale))
            and all(grid[top + r][left + c] != digit for r in range(side) for c in range(side))
        )

    def fill() -> None:
        best = None
        for row in range(scale):
            for col in range(scale):
                if grid[row][col] == ".":
                    fit = [d for d in map(str, range(1, scale + 1)) if fits(row, col, d)]
                    if best is None or len(fit) < len(best[2]):
                        best = (row, col, fit)
        if best is None:
            found.append(["".join(row) for row in grid])
            return
        row, col, fit = best
        for digit in fit:
            grid[row][col] = digit
            fill()
            grid[row][col] = "."
            if len(found) >= limit:
                return

    fill()
    return found


def trajectories_of(env: Any) -> list[str]:
    return ["".join(env.cells[at : at + env.scale]) for at in range(0, env.scale**2, env.scale)]


@pytest.mark.parametrize(("variant", "count"), [("-easy", 20), ("-hard", 3)])
def test_every_puzzle_has_its_answer_as_the_only_solution(variant: str, count: int):
    for seed in range(count):
        env = make(f"game:Sudoku-v0{variant}")
        env.reset(seed)
        assert solutions(trajectories_of(env)) == [env.answer]


def test_full_grids_keep_the_rules_and_differ():
    rng = random.Random(0)
    for scale in (4, 9):
        seen = set[tuple[int, ...]]()
        for _ in range(30):
            grid = full_grid(scale, rng)
            seen.add(tuple(grid))
            for members in shape(scale).members:
                assert sum(grid[cell] for cell in members) == shape(scale).every
                assert len({grid[cell] for cell in members}) == scale
        assert len(seen) > 25


def test_all_288_small_grids_are_drawn_about_equally_often():
    rng = random.Random(5)
    seen = Counter(tuple(full_grid(4, rng)) for _ in range(2880))
    assert len(seen) == 288
    assert min(seen.values()) >= 1 and max(seen.values()) <= 30  # 10 each on average


def test_removals_are_counted_as_attempts():
    rng = random.Random(0)
    for _ in range(5):
        grid = full_grid(9, rng)
        assert 40 <= dig(grid, 50, rng).count(0) <= 50
        assert dig(grid, 1, rng).count(0) == 1
        puzzle = dig(grid, 81, rng)
        assert all(cell in (0, full) for cell, full in zip(puzzle, grid, strict=True))
        assert puzzle.count(0) <= 64  # fewer than 17 clues never fix a grid


def test_refused_digits_leave_the_cell_empty():
    env = put("1234341221434..1", SQUARE)
    for move, reason in (
        ("4 2 4", "does not belong"),
        ("1 1 1", "holds a 1 already"),
        ("0 1 1", "from 1 to 4"),
        ("5 1 1", "from 1 to 4"),
        ("4 2 5", "from 1 to 4"),
    ):
        turn = env.step(f"\\boxed{{{move}}}")
        assert reason in turn.observation and "invalid" in turn.observation
        assert (turn.reward, turn.is_over) == (0.0, False)
    assert env.cells[13] == "."
    assert env.step("\\boxed{4 2 03}").reward == 0.5
    turn = env.step("\\boxed{4 3 2}")
    assert (turn.reward, turn.terminated) == (0.5, True)


def test_the_board_has_headers_and_bars_between_the_boxes():
    assert put("1234341221434..1", SQUARE).board() == (
        "The board:\n"
        "   C1 C2   C3 C4\n"
        "R1  1  2 |  3  4\n"
        "R2  3  4 |  1  2\n"
        "   ------+------\n"
        "R3  2  1 |  4  3\n"
        "R4  4  . |  .  1\n"
        "Your next move:"
    )
    assert "box of 2 x 2" in make("game:Sudoku-v0-easy").reset(seed=0)[0]
    assert "box of 3 x 3" in make("game:Sudoku-v0").reset(seed=0)[0]
