"""2048: sliding, merging, what is paid, when it ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.envs import make
from graft_envs.games.twenty48 import (
    DIRECTIONS,
    Game2048,
    drawn,
    exponent,
    is_stuck,
    slide,
    slide_line,
)


def box(direction: str) -> str:
    return f"\\boxed{{{direction}}}"


def exponent_of(tile: int) -> int:
    return tile.bit_length() - 1


def with_board(cells: str, *, start: int = 1, **settings: int) -> Game2048:
    """A game on `cells`, with the largest tile there already paid for."""
    env = Game2048(**settings)
    env.reset(seed=0)
    env.cells, env.start, env.best = cells, start, exponent(max(cells))
    env.earned = (env.best - start) / (exponent_of(env.target_tile) - start)
    return env


@pytest.mark.parametrize(
    "line, to_end, moved",
    [
        ("aa.b", False, "bb.."),  # 2 2 . 4 -> 4 4, and not 8: the new 4 does not merge again
        ("aaaa", False, "bb.."),
        ("aaa.", False, "ba.."),
        ("aaa.", True, "..ab"),  # the pair nearest to the wall merges
        ("a..a", True, "...b"),
        ("abab", False, "abab"),
        ("....", True, "...."),
    ],
)
def test_a_line_slides_and_each_tile_merges_once(line: str, to_end: bool, moved: str):
    assert slide_line(line, to_end) == moved


def test_rows_and_columns_slide_to_the_side_that_is_named():
    # 2 .
    # 2 .
    assert slide("a.a.", 2, "up") == "b..."
    assert slide("a.a.", 2, "down") == "..b."
    assert slide("a.a.", 2, "left") == "a.a."
    assert slide("a.a.", 2, "right") == ".a.a"


@given(st.text(alphabet=".abcd", min_size=9, max_size=9), st.sampled_from(DIRECTIONS))
def test_a_slide_keeps_the_sum_of_the_tiles(cells: str, direction: str):
    def total(board: str) -> int:
        return sum(1 << exponent(cell) for cell in board if cell != ".")

    moved = slide(cells, 3, direction)
    assert total(moved) == total(cells)
    assert len(moved) == 9


def test_the_game_starts_with_two_tiles_and_shows_four_characters_per_cell():
    env = make("game:Game2048-v0-easy")
    observation, info = env.reset(seed=1)
    assert sum(cell != "." for cell in env.cells) == 2
    assert set(env.cells) <= set(".ab")
    assert observation.endswith(info["suffix"])
    assert drawn("a.bj") == "   2    .    4 1024"
    assert "64" in observation and "50 turns" in observation


def test_doublings_of_the_largest_tile_are_paid_and_sum_to_one():
    # start 2 (exponent 1), target 32 (exponent 5): four doublings, a quarter each
    env = with_board("aa.." + "b..." + "c..." + "d...", target_tile=32)
    env.best, env.earned = 1, 0.0
    env.add_tile = lambda: None  # no luck involved: the board is only what is merged
    rewards = []
    for direction in ["left", "up", "up", "up"]:
        turn = env.step(box(direction))
        rewards.append(turn.reward)
    # 16 stood on the board unpaid: the first move pays 2 -> 16 at once, the last one 16 -> 32
    assert rewards == [0.75, 0.0, 0.0, 0.25]
    assert (turn.terminated, turn.truncated) == (True, False)


def test_tiles_beyond_the_target_pay_no_more_than_the_target():
    env = with_board("ee" + "..", start=1, target_tile=32, board_size=2)
    env.best, env.earned = 4, 0.75
    assert env.step(box("left")).reward == 0.25  # 64 counts as 32
    assert env.is_over


def test_a_move_that_changes_nothing_is_invalid_and_spends_the_turn():
    env = with_board("ab" + "..", board_size=2)
    turn = env.step(box("LEFT"))
    assert "invalid" in turn.observation
    assert turn[1:4] == (0.0, False, False)
    assert (env.cells, env.turns) == ("ab..", 1)


def test_a_board_without_a_move_ends_the_game():
    assert is_stuck("abba", 2)
    assert not is_stuck("aabb", 2)
    assert not is_stuck("ab.a", 2)
    env = with_board("ab" + "a.", board_size=2)
    env.add_tile = lambda: setattr(env, "cells", "abba")
    turn = env.step(box("right"))
    assert turn[1:4] == (0.0, True, False)
    assert "over" in turn.observation


def test_new_tiles_are_fours_one_time_in_ten_and_fall_everywhere():
    env = Game2048()
    env.reset(seed=5)
    seen = {"a": 0, "b": 0}
    places = set()
    for _ in range(4000):
        env.cells = "." * 16
        env.add_tile()
        tile = env.cells.strip(".")
        seen[tile] += 1
        places.add(env.cells.index(tile))
    assert places == set(range(16))
    assert 0.08 < seen["b"] / 4000 < 0.12


def test_the_random_game_draws_target_and_turns_together():
    env = make("game:Game2048-v0-random")
    drawn_sizes = set()
    for seed in range(40):
        env.reset(seed=seed)
        drawn_sizes.add((env.target_tile, env.max_turns))
    assert drawn_sizes == {(16, 20), (32, 30), (64, 50)}
