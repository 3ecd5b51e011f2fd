"""The guessing game in single characters, and its teacher that also guesses at random."""

from __future__ import annotations

import random

import pytest

from graft_envs.games.guess import CompactGuess


def started(answer: int, max_turns: int = 10) -> CompactGuess:
    env = CompactGuess(max_turns=max_turns)
    assert env.reset(0)[0] == "1-20?"
    env.answer = answer
    return env


def test_a_game_in_signs():
    env = started(13, max_turns=5)
    seen = [env.step(f"\\boxed{{{n}}}") for n in (10, 15, 15, 21, 12)]
    assert [turn.observation for turn in seen] == [">?", "<?", "!?", "!?", ">"]
    assert [turn.reward for turn in seen] == [0, 0, 0, 0, pytest.approx(1 - 1 / 19)]
    assert env.is_over
    env = started(13)
    assert env.step("\\boxed{13}")[:3] == ("=", 1.0, True)
    assert started(13).step("13")[:3] == ("!", -0.1, True)


def test_random_rate_is_the_share_of_the_teachers_random_guesses():
    env = started(20)
    assert [text for _, text in env.demonstrate(random.Random(1))][::2][:2] == [
        "\\boxed{10}",
        "\\boxed{15}",
    ]
    firsts = [env.demonstrate(random.Random(n), random_rate=0.5)[0][1] for n in range(400)]
    middle = sum(one in ("\\boxed{10}", "\\boxed{11}") for one in firsts) / 400
    assert 0.48 < middle < 0.62  # half, and two of twenty of the other half: 0.55
    assert {text for n in range(20) for _, text in env.demonstrate(random.Random(n), 1.0)}


def test_the_alphabet_has_every_character():
    env = started(7)
    texts = [text for n in range(9) for _, text in env.demonstrate(random.Random(n), 0.9)]
    assert set("".join(texts)) <= set(env.alphabet)
