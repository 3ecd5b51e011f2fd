"""Tower of Hanoi: the known shortest line wins, self-moves are refused, disks on C are paid."""

from __future__ import annotations

from typing import Any

import pytest

from graft.envs import make


def tower(**kwargs: Any) -> Any:
    env = make("game:TowerofHanoi-v0-easy", **kwargs)
    env.reset(seed=0)
    return env


@pytest.mark.parametrize("text", ["A C", "a c", "AC", "A,C", "A, C", " A  ,  C "])
def test_ways_to_write_a_move(text: str):
    env = tower()
    env.step(f"\\boxed{{{text}}}")
    assert env.pegs == {"A": [3, 2], "B": [], "C": [1]}


@pytest.mark.parametrize("text", ["A D", "A", "A-C", "A C B", "A,,C", "A to C"])
def test_other_writings_are_format_errors(text: str):
    assert tower().step(f"\\boxed{{{text}}}").reward == -0.1


def test_refused_moves_change_nothing():
    env = tower()
    env.step("\\boxed{A C}")
    for move, reason in (
        ("A A", "there already"),
        ("B A", "no disk on B"),
        ("B B", "no disk on B"),
        ("A C", "disk 2 is larger than disk 1"),
    ):
        turn = env.step(f"\\boxed{{{move}}}")
        assert reason in turn.observation and "invalid" in turn.observation
        assert (turn.reward, turn.is_over) == (0.0, False)
    assert env.pegs == {"A": [3, 2], "B": [], "C": [1]}


def test_at_the_limit_the_disks_on_c_are_paid():
    env = tower(max_turns=2)
    env.step("\\boxed{A C}")
    turn = env.step("\\boxed{A B}")
    assert (turn.reward, turn.terminated, turn.truncated) == (1 / 3, True, True)


def test_the_board_lists_disks_from_bottom_to_top():
    assert "A: 3 2\nB: empty\nC: 1\n" in tower().step("\\boxed{A C}").observation
