"""Sokoban: rules, and levels that can be solved in time."""

from __future__ import annotations

import random

import pytest

from graft.envs import make
from graft_envs.games.sokoban import Sokoban
from graft_envs.games.sokoban_levels import make_level


def box(direction: str) -> str:
    return f"\\boxed{{{direction}}}"


def on(picture: str, max_turns: int = 20) -> Sokoban:
    """A game on a drawn level; "*" is the player on a goal, "√" a box on one."""
    rows = picture.split()
    env = Sokoban()
    env.reset(seed=0)
    env.max_turns = max_turns
    flat = "".join(rows)
    fixed = {"#": "#", "_": "_", "O": "O", "X": "_", "P": "_", "*": "O", "√": "O"}
    env.cols, env.rows = len(rows[0]), len(rows)
    env.room = "".join(fixed[c] for c in flat)
    env.player = next(i for i, c in enumerate(flat) if c in "P*")
    env.cells = ["P" if c == "*" else c for c in flat]
    env.num_boxes = flat.count("X") + flat.count("√")
    return env


def test_walking_pushing_and_winning():
    env = on("###### #PX_O# #_XO_# ######")
    turn = env.step(box("right"))
    assert turn[1:4] == (0.0, False, False)
    assert "".join(env.cells[6:12]) == "#_PXO#"
    env.step(box("right"))
    assert "".join(env.cells[6:12]) == "#__P√#"
    assert env.step(box("left")).reward == 0.0
    assert env.step(box("left")).reward == 0.0
    env.step(box("down"))
    turn = env.step(box("right"))
    assert turn[1:4] == (1.0, True, False)


def test_walls_and_second_boxes_block():
    env = on("####### #PXXO_# ####### #######")
    for direction, why in (("up", "wall"), ("left", "wall"), ("right", "box cannot move")):
        turn = env.step(box(direction))
        assert why in turn.observation
        assert turn[1:4] == (0.0, False, False)
        assert env.player == 8
    stuck = on("##### ##PX# #_O_# #####")
    assert "cannot move" in stuck.step(box("right")).observation


def test_a_box_can_be_pushed_off_its_goal_and_the_goal_reappears():
    env = on("####### #P√_O_# #X____# #######", max_turns=9)
    env.step(box("right"))
    assert "".join(env.cells[7:14]) == "#_PXO_#"  # the player now hides the goal
    env.step(box("left"))
    assert "".join(env.cells[7:14]) == "#POXO_#"


def test_the_last_turn_pays_the_share_of_boxes_on_goals():
    env = on("####### #PX_O_# #_X_O_# #######", max_turns=3)
    env.step(box("right"))
    env.step(box("right"))
    turn = env.step(box("left"))
    assert turn[1:4] == (0.5, True, True)
    env = on("####### #PX_O_# #_X_O_# #######", max_turns=1)
    assert env.step("no move").reward == -0.1
    env = on("####### #P√_O_# #_X___# #######", max_turns=1)
    assert env.step(box("up")).reward == 0.5  # an invalid move too


@pytest.mark.parametrize(
    "env_id, most, size, boxes",
    [
        ("game:Sokoban-v0-easy", 20, 36, 2),
        ("game:Sokoban-v0-hard", 50, 64, 4),
    ],
)
def test_every_level_is_solved_by_its_own_proof(env_id: str, most: int, size: int, boxes: int):
    env = make(env_id)
    for seed in range(20):
        env.reset(seed=seed)
        assert len(env.cells) == size
        assert env.cells.count("X") == env.cells.count("O") == boxes  # nothing is solved yet
        assert 0 < len(env.answer) <= most
        turns = [env.step(box(direction)) for direction in env.answer]
        assert turns[-1][1:4] == (1.0, True, False)
        assert sum(turn.reward for turn in turns) == 1.0


def test_the_random_game_really_has_five_boxes_half_of_the_time():
    env = make("game:Sokoban-v0-random")
    sizes = []
    for seed in range(24):
        env.reset(seed=seed)
        assert env.cells.count("X") == env.num_boxes
        assert len(env.answer) <= env.max_turns
        sizes.append((len(env.cells), env.num_boxes, env.max_turns))
    assert set(sizes) == {(36, 2, 20), (64, 5, 50)}
    assert 5 < sizes.count((64, 5, 50)) < 19


def test_levels_are_nearly_always_different_and_not_all_trivial():
    rng = random.Random(0)
    levels = [make_level(rng, 6, 6, 2, 20) for _ in range(60)]
    assert len({(level.room, tuple(level.boxes), level.player) for level in levels}) > 55
    assert sum(len(level.solution) for level in levels) / 60 > 8


def test_the_outer_ring_is_wall_and_rooms_need_not_be_square():
    room = make_level(random.Random(0), 5, 9, 1, 20).room
    rows = [room[at : at + 9] for at in range(0, 45, 9)]
    assert set(rows[0]) == set(rows[-1]) == {"#"}
    assert all(row[0] == row[-1] == "#" for row in rows)


def test_rooms_that_cannot_be_built_are_errors():
    with pytest.raises(ValueError, match="fewer boxes or more turns"):
        Sokoban(dim_room=(4, 4), num_boxes=3).reset(seed=0)
