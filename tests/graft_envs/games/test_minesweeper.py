"""Minesweeper: a safe first reveal, floods by hand, flags, the two ways to win."""

from __future__ import annotations

from typing import Any

from graft.envs import make
from graft.types import Turn
from graft_envs.games.minesweeper import MINE

FIELD = [  # 3 x 4, mines at (0, 3) and (2, 0)
    *(0, 0, 1, MINE),
    *(1, 1, 1, 1),
    *(MINE, 1, 0, 0),
]


def laid(field: list[int], rows: int, cols: int, **kwargs: Any) -> Any:
    env = make("game:Minesweeper-v0", rows=rows, cols=cols, num_mines=field.count(MINE), **kwargs)
    env.reset(seed=0)
    env.field = list(field)
    return env


def cells(env: Any) -> list[str]:
    return ["".join(env.cells[at : at + env.cols]) for at in range(0, len(env.cells), env.cols)]


def test_revealing_all_safe_cells_wins_the_full_reward_on_every_variant():
    for variant in ("", "-very-easy", "-random"):
        for seed in range(4):
            env = make(f"game:Minesweeper-v0{variant}")
            env.reset(seed)
            total = env.step("\\boxed{reveal 1 1}").reward
            while not env.is_over:
                row, col = divmod(
                    next(i for i, n in enumerate(env.field) if n != MINE and env.cells[i] == "."),
                    env.cols,
                )
                total += env.step(f"\\boxed{{Reveal {row} {col}}}").reward
            assert total == 1.0
            assert env.field.count(MINE) == env.num_mines


def test_the_first_reveal_and_its_neighbours_hold_no_mine():
    for seed in range(30):
        env = make("game:Minesweeper-v0-hard")
        env.reset(seed)
        row, col = seed % 8, seed // 4
        env.step(f"\\boxed{{reveal {row} {col}}}")
        around = [
            env.field[r * 8 + c]
            for r in range(max(row - 1, 0), min(row + 2, 8))
            for c in range(max(col - 1, 0), min(col + 2, 8))
        ]
        assert MINE not in around
        assert env.field.count(MINE) == 12


def test_numbers_count_the_mines_around():
    env = make("game:Minesweeper-v0-hard")
    env.reset(seed=3)
    env.step("\\boxed{reveal 4 4}")
    for row in range(8):
        for col in range(8):
            if env.field[row * 8 + col] != MINE:
                block = [
                    env.field[r * 8 + c]
                    for r in range(max(row - 1, 0), min(row + 2, 8))
                    for c in range(max(col - 1, 0), min(col + 2, 8))
                ]
                assert env.field[row * 8 + col] == block.count(MINE)


def test_where_the_block_leaves_no_room_only_the_cell_itself_stays_free():
    for seed in range(10):
        env = make("game:Minesweeper-v0-very-easy")
        env.reset(seed)
        turn = env.step("\\boxed{reveal 1 1}")
        assert turn.reward == 1 / 8
        assert env.field.count(MINE) == 1 and env.field[4] == 1
    full = make("game:Minesweeper-v0", rows=2, cols=2, num_mines=3)
    full.reset(seed=0)
    turn = full.step("\\boxed{reveal 0 1}")
    assert (turn.reward, turn.terminated) == (1.0, True)


def test_a_flood_opens_the_zeros_and_their_rim():
    env = laid(FIELD, 3, 4)
    turn = env.step("\\boxed{reveal 0 0}")
    assert cells(env) == ["001.", "111.", "...."]
    assert turn.reward == 6 / 10
    assert "6 cells opened" in turn.observation
    assert "     0  1  2  3\n  0  0  0  1  .\n  1  1  1  1  .\n" in turn.observation


def test_a_flood_goes_round_flags():
    env = laid(FIELD, 3, 4)
    env.step("\\boxed{flag 0 1}")
    assert env.step("\\boxed{reveal 0 0}").reward == 3 / 10
    assert cells(env) == ["0F..", "11..", "...."]
    assert "flagged" in env.step("\\boxed{reveal 0 1}").observation
    assert "open" in env.step("\\boxed{flag 0 0}").observation
    env.step("\\boxed{FLAG 0 1}")
    assert cells(env)[0] == "0..."


def test_a_mine_ends_the_game_with_nothing_even_under_a_flag():
    env = laid(FIELD, 3, 4)
    env.step("\\boxed{flag 0 3}")
    turn = env.step("\\boxed{reveal 0 3}")
    assert (turn.reward, turn.terminated, turn.truncated) == (0.0, True, False)


def test_refused_moves_change_nothing():
    env = laid(FIELD, 3, 4)
    env.step("\\boxed{reveal 0 0}")
    before = list(env.cells)
    moves = "reveal 0 0, flag 0 0, reveal 3 0, reveal 0 4, dig 2 2, flag 0 99999999"
    for move in moves.split(", "):
        turn = env.step(f"\\boxed{{{move}}}")
        assert (turn.reward, turn.is_over) == (0.0, False)
        assert "invalid" in turn.observation
    assert env.cells == before


def test_a_flagged_first_cell_is_refused_before_any_mine_is_laid():
    env = make("game:Minesweeper-v0")
    env.reset(seed=1)
    env.step("\\boxed{flag 3 3}")
    assert "flagged" in env.step("\\boxed{reveal 3 3}").observation
    assert env.field == []


def test_with_strict_flags_the_mines_must_be_flagged_before_the_last_reveal():
    safe_order = ("0 0", "1 3", "2 1", "2 2")  # 6 cells, 1, 1, then 2 2 opens 2 3 as well
    plain, strict = laid(FIELD, 3, 4), laid(FIELD, 3, 4, strict_flags=True)
    last = unwon = Turn()
    for move in safe_order:
        last = plain.step(f"\\boxed{{reveal {move}}}")
        unwon = strict.step(f"\\boxed{{reveal {move}}}")
        assert last.reward == unwon.reward
    assert last.terminated and not unwon.terminated
    assert "won" in last.observation
    flagged = laid(FIELD, 3, 4, strict_flags=True)
    total, turn = 0.0, Turn()
    for move in ("flag 0 3", "flag 2 0", *(f"reveal {cell}" for cell in safe_order)):
        turn = flagged.step(f"\\boxed{{{move}}}")
        total += turn.reward
    assert turn.terminated and total == 1.0
