"""Hangman: letters pay half, the word the other half, a full board is a win."""

from __future__ import annotations

from typing import Any

import pytest

from graft.envs import make
from graft_envs.games import words


def secret(word: str, **kwargs: Any) -> Any:
    env = make("game:Hangman-v0", word_length=len(word), **kwargs)
    env.reset(seed=0)
    env.answer = word
    return env


def test_uncovering_every_letter_wins_and_pays_the_missing_half():
    env = secret("SEE")
    turns = [env.step(f"\\boxed{{{letter}}}") for letter in "XeS"]
    assert [turn.reward for turn in turns] == pytest.approx([0, 1 / 3, 2 / 3])
    assert sum(turn.reward for turn in turns) == 1.0
    assert (turns[-1].terminated, turns[-1].truncated) == (True, False)


def test_naming_the_word_pays_what_is_hidden_and_a_half():
    env = secret("HOUSE")
    assert env.step("\\boxed{o}").reward == pytest.approx(0.1)
    turn = env.step("\\boxed{house}")
    assert turn.reward == pytest.approx(0.9)
    assert turn.terminated
    assert secret("HOUSE").step("\\boxed{HOUSE}").reward == 1.0


def test_refused_and_wrong_guesses_pay_nothing():
    env = secret("HOUSE")
    env.step("\\boxed{X}")
    env.step("\\boxed{O}")
    for guess, reason in (
        ("x", "tried before"),
        ("O", "tried before"),
        ("HOUSES", "6 letters"),
        ("HO", "2 letters"),
    ):
        turn = env.step(f"\\boxed{{{guess}}}")
        assert reason in turn.observation and "invalid" in turn.observation
        assert (turn.reward, turn.is_over) == (0.0, False)
    turn = env.step("\\boxed{MOUSE}")
    assert "is not the word" in turn.observation and "invalid" not in turn.observation
    assert (turn.reward, turn.is_over) == (0.0, False)


def test_the_board_shows_columns_and_known_letters():
    env = secret("SEE")
    assert "C00 C01 C02\n  _   _   _\n" in env.board()
    assert "C00 C01 C02\n  _   E   E\n" in env.step("\\boxed{E}").observation


def test_the_examples_are_a_letter_as_letter_and_a_word_as_word():
    assert "\\boxed{E} for a letter or \\boxed{ABOUT} for the word" in secret("HOUSE").prompt


def test_hardcore_draws_from_the_long_list():
    env = make("game:Hangman-v0", hardcore=True)
    drawn = {env.reset(seed)[1]["answer"].lower() for seed in range(30)}
    assert drawn <= set(words.full(5))
    assert not drawn <= set(words.basic(5))
