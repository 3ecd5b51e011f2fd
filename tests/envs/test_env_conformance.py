"""What holds for every env in the table."""

from __future__ import annotations

import inspect
import json
import random
from typing import Any

import numpy as np
import pytest

from graft.envs import ENVS, make
from graft.envs.base import BaseEnv
from graft.envs.entry import family_of
from graft.protocols import Env
from graft.types import Author, Task, Turn
from tests.envs.env_kit import build, floor_of, play, scripted, teacher

SEEDS = (0, 2**53 - 1)
RG_SAMPLE = ("rg:chain_sum", "rg:countdown", "rg:composite")
"""Scored as text, by a worker, and a mixture: enough where only the class `Reasoning` matters."""

_QUICK = {*RG_SAMPLE, *sorted(name for name in ENVS if family_of(name) == "rg")[::10]}
every_env = pytest.mark.parametrize(
    "env_id",
    [
        name
        if family_of(name) != "rg" or name in _QUICK
        else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(ENVS)
    ],
)
VARIED = ("game", "eval", "math", "logic", "code", "qa", "webshop")
"""Families whose ids of one class differ in sizes or rows alone: the first and the last stand for all."""

_of_class: dict[str, list[str]] = {}
for _name, _entry in ENVS.items():
    _of_class.setdefault(str(_entry.build), []).append(_name)
_ENDS = {name for names in _of_class.values() for name in (names[0], names[-1])}
every_kind = pytest.mark.parametrize(
    "env_id",
    sorted(
        name
        for name in ENVS
        if (name in RG_SAMPLE or family_of(name) != "rg")
        and (name in _ENDS or family_of(name) not in VARIED)
    ),
)


def seeds_for(env_id: str, count: int) -> range:
    """Items of reasoning-gym take up to a second each: tests share that of seed 0."""
    return range(1 if family_of(env_id) == "rg" else count)


@every_kind
def test_it_follows_the_protocol(env_id: str):
    env = build(env_id)
    assert isinstance(env, Env)
    assert isinstance(env.stop, tuple)
    assert env.observe_as in ("inline", "user", "tool")
    assert not inspect.iscoroutinefunction(env.step)
    assert env.unwrapped.env_id == env_id
    assert ":" in env.unwrapped.entry_point
    with pytest.raises(RuntimeError, match="reset"):
        env.step("1")
    with pytest.raises(ValueError, match="seed=-1"):
        env.reset(-1)
    with pytest.raises(TypeError):
        env.reset(1.5)
    env.close()


@every_env
def test_a_seed_fixes_the_trace_and_the_episodes_after_it(env_id: str):
    random.seed(99)  # no env may draw from the global generators
    np.random.seed(99)
    before = random.getstate(), np.random.get_state()[1].tolist()
    for seed in SEEDS[: len(seeds_for(env_id, 2))]:
        actions = scripted(env_id, seed)
        traces: list[Any] = []
        for used in (False, True):
            env = build(env_id)
            if used:  # what happened before does not matter
                env.reset(seed + 1)
                env.step(env.sample_random_action())
            first = env.reset(seed)
            turns = play(env, actions)
            traces.append((first, _timeless(turns), env.reset(), env.task()))
        assert traces[0] == traces[1]
    assert before == (random.getstate(), np.random.get_state()[1].tolist())


def _timeless(turns: list[Turn]) -> list[Turn]:
    """Without the seconds that a tool took."""
    return [
        turn._replace(info={k: v for k, v in turn.info.items() if "seconds" not in k})
        for turn in turns
    ]


@every_kind
def test_the_seed_of_a_task_gives_an_unseeded_episode_again(env_id: str):
    env = build(env_id)
    env.reset()
    task = env.task()
    other = build(env_id)
    observation, info = other.reset(task.seed)
    assert other.task() == task
    assert (task.env, task.seed, info["seed"]) == (env_id, task.seed, task.seed)
    assert task.id.startswith(f"{env_id}:") and task.id.endswith(f":{task.seed}")
    assert task.data_source
    shown = observation if isinstance(observation, str) else observation[-1]["content"]
    assert task.prompt[-1]["content"] == shown
    assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task


@every_kind
def test_forks_and_snapshots_go_on_like_a_replay(env_id: str):
    for seed in SEEDS if family_of(env_id) in ("graft", "hops") else SEEDS[:1]:
        actions = scripted(env_id, seed)
        env = build(env_id)
        env.reset(seed)
        whole = _timeless(play(env, actions))
        for cut in sorted({0, len(whole) // 2, len(whole) - 1}):
            env = build(env_id)
            env.reset(seed)
            head = play(env, actions[:cut])
            twin = env.fork()
            state = json.loads(json.dumps(env.get_state(), allow_nan=False))
            restored = build(env_id)
            restored.set_state(state)
            assert restored.task() == twin.task() == env.task()
            tail = _timeless(play(twin, actions[cut:]))
            assert _timeless(head) + tail == whole
            # the twin has finished; its origin has not moved and gives the same again
            assert _timeless(play(env, actions[cut:])) == tail
            assert _timeless(play(restored, actions[cut:])) == tail
            assert restored.reset() == twin.reset() == env.reset()


@every_kind
def test_rewards_stay_in_range_and_info_is_plain_data(env_id: str):
    for seed in seeds_for(env_id, 2):
        env = build(env_id)
        observation, info = env.reset(seed)
        json.dumps([observation, info], allow_nan=False)
        _check_margins(observation, info)
        turns = [Turn()]
        while not turns[-1].is_over and len(turns) < 200:
            turns.append(env.step(env.sample_random_action()))
            _check_margins(turns[-1].observation, turns[-1].info)
            assert "required form" not in turns[-1].observation  # what a game says to other text
        assert turns[-1].is_over
        # a format error would cost -0.1 or the game
        assert turns[1].reward > -0.1 or env_id.startswith("game:WikiGame")
        if env.max_turns is not None:
            assert len(turns) - 1 <= env.max_turns
        assert all(floor_of(env_id) <= turn.reward <= 1.0 for turn in turns)
        assert sum(turn.reward for turn in turns) <= 1.0 + 1e-9
        assert all(isinstance(turn.observation, str) for turn in turns)
        json.dumps([turn.info for turn in turns], allow_nan=False)
        with pytest.raises(RuntimeError, match="reset"):
            env.step("after the end")


def _check_margins(observation: Any, info: dict[str, Any]) -> None:
    """Prefix and suffix are the two ends of an observation."""
    if isinstance(observation, str):
        assert observation.endswith(info.get("suffix", ""))
        assert observation.startswith(info.get("prefix", ""))


@every_kind
def test_a_random_action_changes_nothing(env_id: str):
    env, other = build(env_id), build(env_id)
    env.reset(8)
    other.reset(8)
    first, *_ = (env.sample_random_action() for _ in range(3))
    assert first == other.sample_random_action()
    other.fork().sample_random_action()
    assert _timeless([env.step(first)]) == _timeless([other.step(first)])
    assert env.reset() == other.reset()


@pytest.mark.parametrize("env_id", sorted(name for name in ENVS if family_of(name) != "game"))
def test_a_teacher_that_solves_is_paid_in_full_and_sees_the_observations_of_the_env(env_id: str):
    """The games' teachers are tested in games/test_game_teachers.py."""
    best = None
    for seed in seeds_for(env_id, 6):
        env = build(env_id)
        env.reset(seed)
        if teacher(env.fork()) is None:
            continue
        rewards, turn = 0.0, Turn()
        trace = env.demonstrate(random.Random(seed))
        for author, text in trace:
            if author is Author.POLICY:
                turn = env.step(text)
                rewards += turn.reward
            else:
                assert text == turn.observation
        assert turn.is_over
        assert trace[-1][0] is Author.POLICY
        best = max(best or 0.0, rewards)
    assert best is None or best == pytest.approx(1.0)


@every_kind
def test_a_sibling_has_the_same_settings(env_id: str):
    env = build(env_id)
    env.reset(5)
    sibling = env.spawn()
    assert sibling.reset(5) == env.reset(5)
    assert env.spawn(same_state=True).task() == env.task()


@pytest.mark.parametrize(
    "env_id", sorted(name for name, e in ENVS.items() if family_of(name) in ("graft", "earl"))
)
def test_splits_are_disjoint(env_id: str):
    if any(need.startswith("data:") for need in ENVS[env_id].needs):
        pytest.skip("the split of a file is the file's")
    seen: dict[str, set[str]] = {}
    for split in ("train", "test"):
        env = build(env_id, split=split)
        assert env.unwrapped.split == split
        seen[split] = {_instance(env, seed) for seed in range(50)}
    assert not seen["train"] & seen["test"]


def _instance(env: Any, seed: int) -> str:
    env.reset(seed)
    task = env.task()
    return json.dumps([task.prompt, task.answer, task.meta], sort_keys=True)


def test_every_id_of_the_specification_is_there():
    """GEM's 180 ids (39 games, 104 rg, 14 eval, 7 math, 6 webshop, 5 logic, 3 code, 2 qa) and more."""
    count = dict.fromkeys(map(family_of, ENVS), 0)
    for env_id in ENVS:
        count[family_of(env_id)] += 1
    least = {"game": 39 + 13, "rg": 104, "eval": 14, "math": 7, "webshop": 6, "logic": 5, "code": 3}
    assert {family: count[family] >= number for family, number in least.items()} == dict.fromkeys(
        least, True
    )
    stems = "GuessTheNumber Mastermind Minesweeper Wordle Hangman FifteenPuzzle Sudoku"
    stems += " TowerofHanoi Game2048 Sokoban Crosswords WordSearch"
    wanted = {
        *(
            f"game:{s}-v0{kind}"
            for s in stems.split()
            for kind in ("", "-easy", "-hard", "-random")
        ),
        *(f"game:WikiGame-v0{kind}" for kind in ("", "-easy", "-hard")),
        *("game:Game2048-v0-extreme-hard", "qa:NaturalQuestions", "qa:HotpotQA"),
        *(f"webshop:{s}-{k}" for s in ("train", "test") for k in ("html", "text", "text_rich")),
    }
    assert wanted <= set(ENVS)


def test_an_env_of_ones_own_needs_no_table():
    class Own(BaseEnv):
        def pose(self) -> str:
            return "?"

    assert make(f"{__name__}:Plain").reset(0)[0] == "?"
    assert Own().spawn(same_state=True) is not None
    with pytest.raises(TypeError, match="not built by"):
        Own().spawn()


class Plain(BaseEnv):
    def pose(self) -> str:
        return "?"

    def respond(self, action: str) -> Turn:
        return Turn(terminated=True)
