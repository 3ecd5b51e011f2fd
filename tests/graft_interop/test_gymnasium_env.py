"""Gymnasium envs as graft envs, with the real package."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.envs import make_vec
from graft.envs.plain import plain
from graft.protocols import Env
from graft_interop.gymnasium import GymnasiumEnv

gymnasium = pytest.importorskip("gymnasium")

LAKE: dict[str, Any] = {"is_slippery": False, "names": ["left", "down", "right", "up"]}
WAY = ["down", "down", "right", "right", "down", "right"]  # the only dry one, on the 4x4 map


class Echo(gymnasium.Env):
    """Text in, the same text out in capitals; "bye" ends it."""

    observation_space = gymnasium.spaces.Text(100)
    action_space = gymnasium.spaces.Text(8, charset="abcdefghijklmnopqrstuvwxyz")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.bonus = int(self.np_random.integers(10))
        return "say something", {"bonus": np.int64(self.bonus), "seen": (np.ones(2), {"x"})}

    def step(self, action: str) -> Any:
        return action.upper(), np.float64(self.bonus), action == "bye", False, {}


@pytest.mark.peer
def test_frozen_lake_is_won_by_the_dry_way():
    env = GymnasiumEnv("FrozenLake-v1", **LAKE)
    assert isinstance(env, Env)
    observation, info = env.reset(seed=0)
    assert observation == "0" and info["prob"] == 1
    for move in WAY[:-1]:
        turn = env.step(f"I go \\boxed{{{move}}}")
        assert (turn.reward, turn.is_over) == (0.0, False)
    turn = env.step(WAY[-1].upper())
    assert (turn.observation, turn.reward, turn.terminated, turn.truncated) == (
        "15",
        1.0,
        True,
        False,
    )
    env.reset(seed=0)
    assert env.step("1").observation == "4"  # "down" is action 1


@pytest.mark.peer
def test_what_is_no_action_is_answered_and_not_passed_on():
    env = GymnasiumEnv("FrozenLake-v1", max_turns=4, rules="Cross the lake.", **LAKE)
    assert env.reset(seed=0)[0] == "Cross the lake.\n0"
    for text in ("", "\\boxed{jump}", "\\boxed{4}"):
        turn = env.step(text)
        assert "one of: left, down, right, up" in turn.observation
        assert (turn.reward, turn.terminated, turn.info) == (0.0, False, {"invalid": True})
    assert turn.truncated is False
    assert env.step("\\boxed{down}").truncated  # the fourth turn was the last


@cache
def taxi() -> GymnasiumEnv:
    return GymnasiumEnv("Taxi-v4" if "Taxi-v4" in gymnasium.registry else "Taxi-v3")


@pytest.mark.peer
@settings(deadline=None, max_examples=25)
@given(
    text=st.one_of(st.text(max_size=40), st.sampled_from(["9" * 10**6, "\\boxed{9**9**9}", "²"]))
)
def test_no_text_makes_it_raise(text: str):
    env = taxi()
    env.reset(seed=1)
    turn = env.step(text)
    json.dumps(turn.info, allow_nan=False)


@pytest.mark.peer
def test_seed_fork_and_state_hold_for_a_stochastic_env():
    traces: list[Any] = []
    for _ in range(2):
        env = GymnasiumEnv("FrozenLake-v1", is_slippery=True, names=LAKE["names"])
        env.reset(seed=5)
        actions = [env.sample_random_action() for _ in range(3)]
        turns = [env.step(action) for action in actions if not env.is_over]
        traces.append([actions, turns, env.reset()])
    assert traces[0] == traces[1]
    env = GymnasiumEnv("Blackjack-v1", show=lambda cards: f"you {cards[0]}, dealer {cards[1]}")
    for seed in range(20):
        observation, _ = env.reset(seed)
        assert observation.startswith("you ")
        if env.step("\\boxed{1}").is_over:
            continue
        twin = env.fork()
        state = json.loads(json.dumps(env.get_state()))
        other = GymnasiumEnv("Blackjack-v1", show=env.show)
        other.set_state(state)
        stick = env.step("\\boxed{0}")
        assert stick == twin.step("\\boxed{0}") == other.step("\\boxed{0}")
        assert env.reset() == twin.reset() == other.reset()


@pytest.mark.peer
def test_a_text_space_needs_no_help_and_info_becomes_plain():
    env = GymnasiumEnv(Echo())
    observation, info = env.reset(seed=3)
    assert observation == "say something"
    assert info["seen"] == [[1.0, 1.0], ["x"]] and type(info["bonus"]) is int
    turn = env.step("hello")
    assert turn == ("HELLO", float(info["bonus"]), False, False, {}) and type(turn.reward) is float
    assert "not a valid action" in env.step("two words").observation
    assert env.step("bye").terminated
    assert env.forkable and env.task().seed == 3


@pytest.mark.peer
def test_a_vector_of_them_keeps_its_manners():
    path = "graft_interop.gymnasium:GymnasiumEnv"
    with make_vec(path, n=3, env="FrozenLake-v1", **LAKE) as vector:
        vector.reset(seed=0)
        for move in WAY:
            observations, rewards, terminated, _, infos = vector.step([move] * 3)
        assert rewards.tolist() == [1.0] * 3 and terminated.all()
        assert observations == ["0"] * 3
        assert [info["final_observation"] for info in infos] == ["15"] * 3


def test_a_space_without_a_reader_needs_a_parser():
    with pytest.raises(ValueError, match="parse=function"):
        GymnasiumEnv("Pendulum-v1")
    env = GymnasiumEnv(
        "Pendulum-v1",
        parse=lambda text: np.array([float(text)], np.float32) if text[:1].isdigit() else None,
        show=lambda seen: " ".join(f"{value:.1f}" for value in seen),
    )
    env.reset(seed=0)
    assert env.step("1.5").reward < 0 and env.step("no").info == {"invalid": True}
    with pytest.raises(ValueError, match="3 names for 4"):
        GymnasiumEnv("FrozenLake-v1", names=["a", "b", "c"])


class Odd:
    def __str__(self) -> str:
        return "odd"


def test_plain_makes_json_of_anything():
    loop: list[Any] = []
    loop.append(loop)
    value = {
        1: float("inf"),
        "a": (Odd(), b"x"),
        "n": np.arange(3),
        "loop": loop,
        "np": np.bool_(1),
    }
    made = plain(value)
    assert made["1"] is None and made["a"] == ["odd", "b'x'"] and made["n"] == [0, 1, 2]
    assert made["np"] is True
    json.dumps(made, allow_nan=False)
