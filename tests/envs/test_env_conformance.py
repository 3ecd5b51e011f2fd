"""What every env in the table must hold, found by going through the table."""

from __future__ import annotations

import inspect
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.envs import ENVS, make
from graft.protocols import Env
from graft.types import Author, Task, Turn

SEEDS = (0, 1, 12345, 2**53 - 1)

every_env = pytest.mark.parametrize("env_id", sorted(ENVS))


def scripted(env: Any, seed: int, count: int = 12) -> list[str]:
    """A mixed list of actions for this instance: the teacher's, random ones, nonsense."""
    rng = random.Random(seed)
    env.reset(seed)
    told = [text for author, text in env.demonstrate(rng) if author is Author.POLICY]
    rest = [env.sample_random_action() for _ in range(count)] + ["", "?", "]", "é\x00"]
    rng.shuffle(rest)
    return [rest[0], *told, *rest]


def play(env: Any, actions: list[str]) -> list[Turn]:
    turns: list[Turn] = []
    for action in actions:
        turns.append(env.step(action))
        if turns[-1].is_over:
            break
    return turns


@every_env
def test_it_speaks_the_protocol(env_id: str):
    assert isinstance(make(env_id), Env)
    env = make(env_id)
    assert isinstance(env.stop, tuple)
    assert env.observe_as in ("inline", "user", "tool")
    assert not inspect.iscoroutinefunction(env.step)
    assert env.unwrapped.env_id == env_id
    assert ":" in env.unwrapped.entry_point
    env.close()


@every_env
def test_a_seed_fixes_the_trace_and_the_episodes_after_it(env_id: str):
    for seed in SEEDS:
        actions = scripted(make(env_id), seed)
        traces: list[Any] = []
        for _ in range(2):
            env = make(env_id)
            first = env.reset(seed)
            turns = play(env, actions)
            traces.append((first, turns, env.reset(), env.task(), env.reset(), env.task()))
        assert traces[0] == traces[1]


@every_env
def test_a_seed_poses_the_same_task_whatever_happened_before(env_id: str):
    used = make(env_id)
    for seed in (3, 4, None, 5):
        used.reset(seed)
        play(used, [used.sample_random_action(), "x"])
    random.seed(99)  # the global generator is nobody's
    for seed in SEEDS:
        fresh = make(env_id)
        assert used.reset(seed) == fresh.reset(seed)
        assert used.task() == fresh.task()


@every_env
def test_an_unseeded_episode_can_be_posed_again_by_the_seed_of_its_task(env_id: str):
    env = make(env_id)
    env.reset()
    task = env.task()
    other = make(env_id)
    other.reset(task.seed)
    assert other.task() == task
    env.reset()
    assert env.task().prompt != task.prompt


@every_env
def test_the_global_generator_is_left_alone(env_id: str):
    before = random.getstate()
    env = make(env_id)
    env.reset(7)
    env.demonstrate(random.Random(0))
    play(env, scripted(make(env_id), 7))
    assert random.getstate() == before


@every_env
def test_a_fork_goes_on_like_a_replay_and_apart_from_its_origin(env_id: str):
    for seed in SEEDS:
        actions = scripted(make(env_id), seed)
        origin = make(env_id)
        origin.reset(seed)
        length = len(play(origin, actions))
        for cut in range(length):
            env = make(env_id)
            env.reset(seed)
            head = play(env, actions[:cut])
            twin = env.fork()
            tail = play(twin, actions[cut:])
            replayed = make(env_id)
            replayed.reset(seed)
            assert head + tail == play(replayed, actions)
            assert env.task() == twin.task()
            # the twin has finished; its origin has not moved and gives the same again
            assert play(env, actions[cut:]) == tail
            assert env.reset() == twin.reset()


@every_env
def test_state_survives_json_and_a_fresh_env(env_id: str):
    for seed in SEEDS:
        actions = scripted(make(env_id), seed)
        env = make(env_id)
        env.reset(seed)
        if len(play(env.fork(), actions)) > 1:
            env.step(actions[0])
            actions = actions[1:]
        state = json.loads(json.dumps(env.get_state(), allow_nan=False))
        other = make(env_id)
        other.set_state(state)
        assert other.task() == env.task()
        assert play(other, actions) == play(env, actions)
        assert other.reset() == env.reset()
        assert isinstance(other.stop, tuple)


@every_env
def test_rewards_lie_between_0_and_1_and_an_end_is_one_of_two_kinds(env_id: str):
    for seed in range(30):
        env = make(env_id)
        env.reset(seed)
        turns = play(env, scripted(env.fork(), seed) * 3)
        assert turns[-1].is_over
        assert not (turns[-1].terminated and turns[-1].truncated)
        assert all(0.0 <= turn.reward <= 1.0 for turn in turns)
        assert all(isinstance(turn.observation, str) for turn in turns)
        json.dumps([turn.info for turn in turns], allow_nan=False)
        with pytest.raises(RuntimeError, match="reset"):
            env.step("after the end")


@every_env
def test_stepping_before_the_first_reset_is_a_mistake_of_the_caller(env_id: str):
    with pytest.raises(RuntimeError, match="reset"):
        make(env_id).step("1")


@every_env
def test_a_bad_seed_is_refused(env_id: str):
    with pytest.raises(ValueError, match="seed=-1"):
        make(env_id).reset(-1)
    with pytest.raises(TypeError):
        make(env_id).reset(1.5)  # pyright: ignore


@every_env
def test_a_task_is_named_by_env_split_and_seed_and_survives_json(env_id: str):
    for split in ("train", "test"):
        env = make(env_id, split=split)
        observation, info = env.reset(11)
        task = env.task()
        assert task.id == f"{env_id}:{split}:11"
        assert (task.env, task.seed, info["seed"]) == (env_id, 11, 11)
        assert task.data_source
        assert info["answer"] == task.answer is not None
        assert task.prompt[-1]["content"] == observation
        assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task


@every_env
def test_a_teacher_that_solves_is_paid_in_full_and_sees_what_the_env_says(env_id: str):
    best = 0.0
    for seed in range(20):
        env = make(env_id)
        env.reset(seed)
        rewards = 0.0
        turn = Turn()
        told = env.demonstrate(random.Random(seed))
        for author, text in told:
            if author is Author.POLICY:
                turn = env.step(text)
                rewards += turn.reward
            else:
                assert text == turn.observation
        assert turn.terminated
        assert told[-1][0] is Author.POLICY
        best = max(best, rewards)
    assert best == 1.0


@every_env
def test_splits_are_disjoint(env_id: str):
    seen: dict[str, set[str]] = {}
    for split in ("train", "test"):
        env = make(env_id, split=split)
        seen[split] = {str(env.reset(seed)[0]) for seed in range(200)}
        assert len(seen[split]) > 150
    assert not seen["train"] & seen["test"]


HOSTILE = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="[]()+-*/=.;?0123456789 #<>/answer\n", max_size=60),
    st.sampled_from(
        ["", " ", "]", "[", "[]", "[" * 9, "[9**9**9]", "<answer></answer>", "9" * 200_000]
    ),
    st.text(max_size=20).map("<answer>{}</answer>".format),
    st.text(max_size=20).map("[{}]".format),
    st.sampled_from("[(<0é\x00").map(lambda character: character * 1_000_000),
)


@every_env
@settings(deadline=None, max_examples=60)
@given(actions=st.lists(HOSTILE, min_size=1, max_size=8), seed=st.integers(0, 50))
def test_no_action_makes_it_raise(env_id: str, actions: list[str], seed: int):
    env = make(env_id)
    env.reset(seed)
    for turn in play(env, actions):
        assert 0.0 <= turn.reward <= 1.0
        assert len(turn.observation) < 1000
        json.dumps(turn.info, allow_nan=False)
