"""GEM envs as graft envs, with the real package."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from graft.protocols import Env
from graft_interop.gem import GemEnv, complete

gem = pytest.importorskip("gem")

GUESS = "game:GuessTheNumber-v0-easy"


def boxed(number: int) -> str:
    return f"\\boxed{{{number}}}"


@pytest.mark.peer
def test_a_gem_game_plays_like_a_graft_one():
    env = GemEnv(GUESS)
    assert isinstance(env, Env)
    observation, info = env.reset(seed=3)
    assert observation.endswith(info["suffix"]) and "between 1 and 10" in observation
    hidden = env.env.game_number
    wrong = 1 if hidden != 1 else 2
    turn = env.step(boxed(wrong))
    assert (turn.reward, turn.is_over) == (0.0, False)
    assert turn.observation.endswith(turn.info["suffix"])
    turn = env.step(boxed(hidden))
    assert (turn.reward, turn.terminated) == (1.0, True)
    made = GemEnv(gem.make(GUESS))
    assert made.reset(seed=3)[0] == observation


@pytest.mark.peer
def test_neighbours_and_the_global_generators_do_not_matter():
    def play(env: Any, noise: bool) -> list[Any]:
        other = GemEnv("game:Game2048-v0-easy")
        other.reset(seed=9)
        trace: list[Any] = [env.reset(seed=4)]
        for _ in range(5):
            if noise:
                random.random()
                np.random.random()
                other.step(other.sample_random_action())
            trace.append(env.step(env.sample_random_action()))
        return trace

    before = random.getstate()
    quiet = play(GemEnv("game:Game2048-v0-easy"), noise=False)
    assert random.getstate() == before
    assert play(GemEnv("game:Game2048-v0-easy"), noise=True) == quiet


@pytest.mark.peer
def test_fork_and_state_go_on_alike():
    env = GemEnv("game:Game2048-v0-easy")
    env.reset(seed=2)
    env.step("\\boxed{left}")
    twin = env.fork()
    state = json.loads(json.dumps(env.get_state()))
    other = GemEnv("game:Game2048-v0-easy")
    other.set_state(state)
    moves = [f"\\boxed{{{word}}}" for word in ("up", "left", "down", "right")]
    first = [env.step(move) for move in moves]
    assert first == [twin.step(move) for move in moves] == [other.step(move) for move in moves]


def test_margins_become_part_of_the_observation():
    assert complete("seen\n", {"suffix": "board"}) == "seen\nboard"
    assert complete("seen", {"prefix": "rules"}) == "rules\nseen"
    assert complete("seen", {}) == "seen"
