"""The fifteen puzzle: solvable starts that differ, tiles that slide, pay at the limit."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from typing import Any

import pytest

from graft.envs import make
from graft_envs.games.fifteen import MOVES, goal, is_solvable, sources


def put(tiles: list[int], **kwargs: Any) -> Any:
    env = make("game:FifteenPuzzle-v0", num_rows=int(len(tiles) ** 0.5), **kwargs)
    env.reset(seed=0)
    env.tiles = list(tiles)
    return env


def test_easy_has_all_eleven_boards_and_none_of_them_is_solved():
    for algorithm in ("monte_carlo", "pure_random"):
        env = make("game:FifteenPuzzle-v0-easy", init_algo=algorithm)
        seen = Counter(tuple((env.reset(seed), env.tiles)[1]) for seed in range(400))
        assert len(seen) == 11
        assert (1, 2, 3, 0) not in seen
        assert min(seen.values()) > 10


@pytest.mark.parametrize("algorithm", ["monte_carlo", "pure_random"])
def test_starts_are_solvable_and_never_solved(algorithm: str):
    for variant in ("", "-easy", "-hard", "-random"):
        env = make(f"game:FifteenPuzzle-v0{variant}", init_algo=algorithm)
        for seed in range(25):
            env.reset(seed)
            assert sorted(env.tiles) == list(range(env.num_rows**2))
            assert env.tiles != goal(env.num_rows)
            assert is_solvable(env.tiles, env.num_rows)
    one = make("game:FifteenPuzzle-v0", init_algo=algorithm, mc_rand_moves=1)
    one.reset(seed=0)
    assert one.tiles != goal(3)


def test_solvable_are_exactly_the_boards_that_moves_reach():
    reached = {(1, 2, 3, 0)}
    queue = [(1, 2, 3, 0)]
    while queue:
        board = queue.pop()
        gap = board.index(0)
        for tile in sources(2)[gap].values():
            moved = list(board)
            moved[gap], moved[tile] = moved[tile], 0
            if tuple(moved) not in reached:
                reached.add(tuple(moved))  # pyright: ignore
                queue.append(tuple(moved))  # pyright: ignore
    assert len(reached) == 12
    for board in permutations(range(4)):
        assert is_solvable(list(board), 2) == (board in reached)
    assert not is_solvable([1, 2, 3, 4, 5, 6, 8, 7, 0], 3)
    assert is_solvable([1, 2, 3, 4, 0, 5, 7, 8, 6], 3)


def test_the_tile_moves_in_the_named_direction():
    env = put([1, 2, 3, 4, 0, 5, 7, 8, 6])
    assert " 4 __  5\n" in env.board()
    assert "Tile 5 moved" in env.step("\\boxed{LEFT}").observation
    assert env.tiles == [1, 2, 3, 4, 5, 0, 7, 8, 6]
    assert env.step("\\boxed{up}").reward == 1.0
    env = put([1, 2, 3, 4, 0, 5, 7, 8, 6])
    env.step("\\boxed{down}")
    assert env.tiles == [1, 0, 3, 4, 2, 5, 7, 8, 6]
    env.step("\\boxed{right}")
    assert env.tiles == [0, 1, 3, 4, 2, 5, 7, 8, 6]


def test_no_tile_comes_from_beyond_the_edge():
    for place, refused in ((0, ("down", "right")), (8, ("up", "left"))):
        tiles = [1, 2, 3, 4, 5, 6, 7, 8]
        tiles.insert(place, 0)
        tiles[3], tiles[4] = tiles[4], tiles[3]  # not the ordered board
        for word in MOVES:
            env = put(tiles)
            turn = env.step(f"\\boxed{{{word}}}")
            assert ("invalid" in turn.observation) == (word in refused)
            assert (env.tiles == tiles) == (word in refused)


def test_at_the_limit_the_places_that_are_right_are_paid():
    turn = put([1, 2, 3, 4, 0, 5, 7, 8, 6], max_turns=1).step("\\boxed{left}")
    assert (turn.reward, turn.terminated, turn.truncated) == (7 / 9, True, True)
    turn = put([1, 2, 3, 4, 0, 5, 7, 8, 6], max_turns=1).step("\\boxed{down}")
    assert turn.reward == 5 / 9
    turn = put([0, 1, 3, 2], max_turns=1).step("\\boxed{right}")  # refused, still the last turn
    assert turn.reward == 1 / 4
