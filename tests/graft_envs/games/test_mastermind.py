"""Mastermind: pegs by hand, pay for progress only, guesses that are refused."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import pytest

from graft.envs import make
from graft_envs.games.mastermind import arrange, pegs


def coded(code: list[int], **kwargs: Any) -> Any:
    env = make("game:Mastermind-v0", **kwargs)
    env.reset(seed=0)
    env.answer = code
    return env


def test_pegs_are_those_of_the_two_passes_for_all_short_rows():
    for guess, code in product(product((1, 2, 3), repeat=3), repeat=2):
        blacks = sum(a == b for a, b in zip(guess, code, strict=True))
        whites = sum(min(guess.count(n), code.count(n)) for n in (1, 2, 3)) - blacks
        assert pegs(list(guess), list(code)) == (blacks, whites)


def test_only_progress_beyond_the_best_guess_pays():
    env = coded([1, 2, 3, 4])
    rewards = [
        env.step(f"\\boxed{{{guess}}}").reward
        for guess in ("1 3 2 6", "6 2 5 5", "1 2 5 5", "1 5 5 5", "1 2 3 4")
    ]
    assert rewards == [0.25, 0.0, 0.25, 0.0, 0.5]
    assert env.is_over


def test_feedback_counts_black_and_white_pegs():
    assert (
        "Black pegs: 1, white pegs: 2." in coded([1, 2, 3, 4]).step("\\boxed{1 3 2 6}").observation
    )


@pytest.mark.parametrize(
    ("guess", "reason"),
    [
        ("1 2 3", "3 numbers were given, the code has 4"),
        ("1 2 3 4 5", "5 numbers were given"),
        ("1 2 3 7", "from 1 to 6"),
        ("0 1 2 3", "from 1 to 6"),
        ("1 2 3 999999999999999999999999", "from 1 to 6"),
        ("5 5 6 6", "tried before"),
        (" 05  5\t6 6 ", "tried before"),
    ],
)
def test_refused_guesses(guess: str, reason: str):
    env = coded([1, 2, 3, 4])
    env.step("\\boxed{5 5 6 6}")  # repeats within a guess are fine
    turn = env.step(f"\\boxed{{{guess}}}")
    assert reason in turn.observation and "invalid" in turn.observation
    assert (turn.reward, turn.is_over) == (0.0, False)
    assert list(env.tried) == ["5 5 6 6"]


def test_codes_repeat_numbers_only_if_set():
    env = make("game:Mastermind-v0-hard")
    codes = [env.reset(seed)[1]["answer"] for seed in range(100)]
    assert all(len(set(code)) == 4 for code in codes)
    assert set().union(*codes) == set(range(1, 9))
    env = make("game:Mastermind-v0", code_length=3, num_numbers=2, duplicate_numbers=True)
    assert {tuple(env.reset(seed)[1]["answer"]) for seed in range(100)} == set(
        product((1, 2), repeat=3)
    )


def test_arrange_finds_every_row_once():
    rows = [tuple(arrange(index, 4, 3)) for index in range(24)]
    assert sorted(rows) == sorted(permutations(range(1, 5), 3))
    assert [arrange(index, 3, 2) for index in range(4)] == [[1, 2], [2, 1], [3, 1], [1, 3]]
