"""Tower of Hanoi: the known shortest line wins, self-moves are refused, disks on C are paid."""

from __future__ import annotations

from typing import Any

import pytest

from graft.envs import make


def line(disks: int, source: str = "A", target: str = "C", spare: str = "B") -> list[str]:
    if disks == 0:
        return []
    before = line(disks - 1, source, spare, target)
    return [*before, f"{source} {target}", *line(disks - 1, spare, target, source)]


def tower(**kwargs: Any) -> Any:
    env = make("game:TowerofHanoi-v0-easy", **kwargs)
    env.reset(seed=0)
    return env


def test_the_shortest_line_wins_on_every_variant():
    for variant, disks in (("", 4), ("-easy", 3), ("-hard", 5), ("-random", None)):
        for seed in range(4):
            env = make(f"game:TowerofHanoi-v0{variant}")
            env.reset(seed)
            assert disks in (None, env.num_disks)
            turns = [env.step(f"\\boxed{{{move}}}") for move in line(env.num_disks)]
            assert len(turns) == 2**env.num_disks - 1
            assert [turn.reward for turn in turns] == [0.0] * (len(turns) - 1) + [1.0]
            assert (turns[-1].terminated, turns[-1].truncated) == (True, False)


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
