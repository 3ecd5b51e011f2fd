"""Guess the number: 0 is a guess, halving wins, the last guess is paid by its distance."""

from __future__ import annotations

from typing import Any

from graft.envs import make


def hidden(answer: int, **kwargs: Any) -> Any:
    env = make("game:GuessTheNumber-v0-easy", **kwargs)
    env.reset(seed=0)
    env.answer = answer
    return env


def test_zero_and_numbers_out_of_range_are_invalid_and_not_format_errors():
    env = hidden(7)
    for text in ("0", "11", "9" * 400):
        turn = env.step(f"\\boxed{{{text}}}")
        assert (turn.reward, turn.is_over) == (0.0, False)
        assert "not between 1 and 10" in turn.observation
    assert env.tried == []


def test_a_repeated_guess_is_invalid():
    env = hidden(7)
    assert "higher" in env.step("\\boxed{3}").observation
    assert "tried before" in env.step("\\boxed{03}").observation
    assert env.tried == [3]


def test_the_last_guess_is_paid_by_its_distance():
    for last, reward in ((9, 1 - 2 / 9), (1, 1 - 6 / 9), (11, 0.0), (0, 0.0)):
        env = hidden(7, max_turns=1)
        turn = env.step(f"\\boxed{{{last}}}")
        assert (turn.reward, turn.terminated, turn.truncated) == (reward, True, True)
    env = hidden(7, max_turns=2)
    env.step("\\boxed{4}")
    assert (
        env.step("\\boxed{4}").reward == 1 - 3 / 9
    )  # a repeat is invalid, yet it is the last guess


def test_a_hit_on_the_last_turn_is_terminated_only():
    env = hidden(7, max_turns=1)
    turn = env.step("I say \\boxed{3}, no, \\boxed{7}.")
    assert (turn.reward, turn.terminated, turn.truncated) == (1.0, True, False)


def test_drawn_bounds_keep_their_distance_and_set_the_turns():
    for seed in range(40):
        env = make("game:GuessTheNumber-v0-random")
        env.reset(seed)
        assert 1 <= env.low <= 10
        assert 5 <= env.high - env.low <= 50
        assert env.low <= env.answer <= env.high
        assert (env.max_turns - 2) ** 2 < env.high - env.low <= (env.max_turns - 1) ** 2
    env = make("game:GuessTheNumber-v0-random", max_number=30)
    env.reset(seed=1)
    assert env.high == 30 and 1 <= env.low <= 10


def test_every_number_is_drawn():
    env = make("game:GuessTheNumber-v0-easy")
    assert {env.reset(seed)[1]["answer"] for seed in range(200)} == set(range(1, 11))
