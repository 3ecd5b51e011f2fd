"""Wordle: marks by hand, pay for new greens, the dictionary."""

from __future__ import annotations

from typing import Any

import pytest

from graft.envs import make
from graft_envs.games import words
from graft_envs.games.wordle import marks


def secret(word: str, **kwargs: Any) -> Any:
    env = make("game:Wordle-v0", word_length=len(word), **kwargs)
    env.reset(seed=0)
    env.answer = word
    return env


@pytest.mark.parametrize(
    ("guess", "word", "shown"),
    [
        ("ABBEY", "ABBEY", "GGGGG"),
        ("BABES", "ABBEY", "YYGGX"),
        ("LLAMA", "LABEL", "GYYXX"),
        ("EERIE", "ABBEY", "YXXXX"),
        ("GEESE", "EAGLE", "YYXXG"),  # the green E at the end is served first
        ("ZZZZZ", "ABBEY", "XXXXX"),
    ],
)
def test_marks(guess: str, word: str, shown: str):
    assert marks(guess, word) == shown


def test_new_greens_pay_a_tenth_each_and_the_word_the_rest():
    env = secret("ABBEY")
    rewards = [
        env.step(f"\\boxed{{{guess}}}").reward for guess in ("babes", "BBBBB", "A b b o t", "ABBEY")
    ]
    # BBBBB turns place 2 green (place 3 was so before), ABBOT place 1, ABBEY place 5
    assert rewards == pytest.approx([0.2, 0.1, 0.1, 0.6])
    assert sum(rewards) == 1.0
    assert env.is_over


def test_the_feedback_is_a_plain_row_of_marks():
    assert "BABES is marked YYGGX." in secret("ABBEY").step("\\boxed{babes}").observation


def test_refused_guesses():
    env = secret("ABBEY")
    env.step("\\boxed{BABES}")
    for guess, reason in (
        ("ABBE", "4 letters"),
        ("ABBEYS", "6 letters"),
        ("babes", "tried before"),
    ):
        turn = env.step(f"\\boxed{{{guess}}}")
        assert reason in turn.observation and "invalid" in turn.observation
        assert (turn.reward, turn.is_over) == (0.0, False)
    assert env.tried == ["BABES"]


def test_the_dictionary_is_used_only_if_set():
    assert "is marked" in secret("ABBEY").step("\\boxed{QZXVJ}").observation
    env = secret("ABBEY", only_real_words=True)
    assert "words of the dictionary" in env.prompt
    turn = env.step("\\boxed{QZXVJ}")
    assert "not in the dictionary" in turn.observation and "invalid" in turn.observation
    assert env.tried == []
    assert "is marked" in env.step("\\boxed{Crane}").observation


def test_secrets_are_common_words_of_the_dictionary():
    env = make("game:Wordle-v0-hard", only_real_words=True)
    for seed in range(30):
        env.reset(seed)
        assert env.answer.lower() in words.basic(5)
        assert env.answer.lower() in words.dictionary(5)
