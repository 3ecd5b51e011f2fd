"""What holds for a vector of envs, however its steps are carried out."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.envs import make, make_vec
from graft.envs.base import Wrapper
from graft.envs.vector.threads import ThreadVector
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer

TOYS = "tests.envs.vector.toy_envs"
ADDER, WAITER = f"{TOYS}:Adder", f"{TOYS}:Waiter"
MODES = ("serial", "threads")

every_mode = pytest.mark.parametrize("mode", MODES)


@every_mode
def test_a_step_gives_five_columns(vectors: Any, mode: str):
    vector = vectors([ADDER] * 3, mode=mode, seed=10)
    observations, infos = vector.reset()
    assert observations == ["start 10", "start 11", "start 12"]
    assert [info["seed"] for info in infos] == [10, 11, 12]
    observations, rewards, terminated, truncated, infos = vector.step(["1", "2", "3"])
    assert observations == ["total 11", "total 13", "total 15"]
    assert rewards.dtype == np.float64 and rewards.tolist() == [1.0, 2.0, 3.0]
    assert terminated.dtype == np.bool_ and not terminated.any()
    assert truncated.dtype == np.bool_ and not truncated.any()
    assert infos == [{}, {}, {}]


@every_mode
def test_a_dict_steps_only_those_in_its_order(vectors: Any, mode: str):
    vector = vectors(ADDER, n=3, mode=mode)
    vector.reset(seed=50)
    observations, rewards, terminated, truncated, infos = vector.step({2: "4", 0: "9"})
    assert observations == ["total 56", "total 59"] and rewards.tolist() == [4.0, 9.0]
    assert len(terminated) == len(truncated) == len(infos) == 2
    assert vector.step(["0"] * 3)[0] == ["total 59", "total 51", "total 56"]
    assert [len(column) for column in vector.step({})] == [0] * 5


@every_mode
def test_seeds_are_one_number_or_one_per_env_or_the_next_episode(vectors: Any, mode: str):
    vector = vectors(ADDER, n=2, mode=mode, seed=7)
    assert vector.reset(seed=[30, 20])[0] == ["start 30", "start 20"]
    assert vector.reset(seed=5)[0] == ["start 5", "start 6"]
    singles = [make(ADDER), make(ADDER)]
    for index, env in enumerate(singles):
        env.reset(5 + index)
    assert vector.reset()[0] == [env.reset()[0] for env in singles]
    assert vector.reset(seed=[4, None], only=[1, 0])[0] == ["start 4", singles[0].reset()[0]]


def test_a_bare_string_is_one_env_and_ids_may_differ():
    assert make_vec(ADDER).num_envs == 1
    with closing(make_vec([ADDER, "arithmetic"], seed=0)) as vector:
        assert vector.env_ids == [ADDER, "arithmetic"] and len(vector) == 2
        assert vector.reset()[0] == ["start 0", make("arithmetic").reset(1)[0]]


@every_mode
def test_vec_kwargs_are_read_only_and_may_be_one_dict_many_times(vectors: Any, mode: str):
    shared: dict[str, Any] = {}
    vector = vectors(ADDER, n=3, mode=mode, vec_kwargs=[shared] * 3, seed=1, add=20)
    assert vector.reset()[0] == ["start 21", "start 22", "start 23"]
    assert shared == {}
    own = [{"add": 1}, {"add": 2, "seed": 40}]
    assert vectors(ADDER, n=2, mode=mode, vec_kwargs=own).reset()[0] == ["start 1", "start 42"]
    assert own[1] == {"add": 2, "seed": 40}
    assert vectors(ADDER, n=2, mode=mode, vec_kwargs=own, add=5).reset()[0][0] == "start 5"


class Loud(Wrapper):
    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed)
        return f"{observation}!", info


def test_wrappers_may_be_functions_put_around_in_order(vectors: Any):
    for mode in ("serial", "threads"):
        vector = vectors(ADDER, n=2, mode=mode, wrappers=[Loud, Loud])
        assert vector.reset()[0] == ["start 0!!", "start 1!!"]


def test_wrappers_may_have_arguments_and_a_tokenizer(vectors: Any):
    vector = vectors(ADDER, n=1, wrappers=[{"max_history": {"turns": 1}}, "episode_tracking"])
    vector.reset(seed=4)
    vector.step(["1"])
    (shown,), _, _, _, (info,) = vector.step(["2"])
    assert shown == "start 4\n2\ntotal 7" and info["step_counter"] == 2
    chat = Chat(FastTokenizer.bytes(), "chatml")
    vector = vectors(ADDER, n=1, wrappers="concat_chat", tokenizer=chat)
    (shown,), _ = vector.reset(seed=4)
    assert shown == "<|im_start|>user\nstart 4<|im_end|>\n<|im_start|>assistant\n"


@every_mode
def test_wrappers_may_be_names_in_every_mode(vectors: Any, mode: str):
    vector = vectors(ADDER, n=2, mode=mode, wrappers="concat,episode_tracking")
    vector.reset()
    observations, _, _, _, infos = vector.step(["1", "2"])
    assert "start 1" in observations[1] and "total 3" in observations[1]
    assert [info["step_counter"] for info in infos] == [1, 1]


@every_mode
def test_the_final_observation_and_info_survive_an_autoreset_in_the_same_step(
    vectors: Any, mode: str
):
    vector = vectors(ADDER, n=2, mode=mode)
    vector.reset()
    vector.step(["5", "5"])
    observations, rewards, terminated, truncated, infos = vector.step(["end", "1"])
    single = make(ADDER)
    single.reset(0)
    assert observations == [single.reset()[0], "total 7"]
    assert rewards.tolist() == [1.0, 1.0]
    assert terminated.tolist() == [True, False] and truncated.tolist() == [False, False]
    assert infos[0]["final_observation"] == "end 5" and infos[0]["final_info"] == {"last": 5}
    assert infos[0]["seed"] == single.seed and infos[1] == {}


@every_mode
def test_an_autoreset_in_the_next_step_ignores_its_action(vectors: Any, mode: str):
    vector = vectors(ADDER, n=2, mode=mode, autoreset="next_step")
    vector.reset()
    observations, _, terminated, _, infos = vector.step(["end", "1"])
    assert observations == ["end 0", "total 2"] and terminated.tolist() == [True, False]
    assert infos[0] == {"last": 0}
    single = make(ADDER)
    single.reset(0)
    observations, rewards, terminated, truncated, infos = vector.step(["9", "1"])
    assert observations == [single.reset()[0], "total 3"] and rewards.tolist() == [0.0, 1.0]
    assert not terminated.any() and not truncated.any()
    assert vector.step(["0", "0"])[0][0] == f"total {single.total}"


@every_mode
def test_without_autoreset_a_step_after_the_end_is_an_error_result(vectors: Any, mode: str):
    vector = vectors(ADDER, n=2, mode=mode, autoreset="off")
    vector.reset()
    vector.step(["end", "1"])
    for _ in range(2):
        _, rewards, terminated, truncated, infos = vector.step(["9", "1"])
        assert rewards.tolist() == [0.0, 1.0]
        assert terminated.tolist() == [False, False] and truncated.tolist() == [True, False]
        assert "call reset()" in infos[0]["error"] and infos[1] == {}
    assert vector.reset(seed=[3], only=[0])[0] == ["start 3"]
    assert vector.step(["1", "1"])[0] == ["total 4", "total 5"]


@every_mode
def test_results_come_as_they_are_ready(vectors: Any, mode: str):
    vector = vectors(ADDER, n=3, mode=mode)
    vector.reset()
    vector.send({2: "1", 0: "end"})
    with pytest.raises(ValueError, match="env 2 has not answered"):
        vector.send({2: "1"})
    with pytest.raises(RuntimeError, match=r"\[0, 2\] have not answered"):
        vector.step(["1"] * 3)
    done = dict(vector.drain())
    assert done[2].observation == "total 3" and done[0].terminated
    assert done[0].info["final_observation"] == "end 0"
    with pytest.raises(RuntimeError, match="nothing was sent"):
        vector.recv()


def test_a_slow_env_does_not_hold_up_a_quick_one(vectors: Any):
    vector = vectors(ADDER, mode="threads", vec_kwargs=[{"pause": 0.4}, {}], n=2)
    vector.reset()
    vector.send({0: "1"})
    for turn in range(5):
        vector.send({1: "1"})
        assert [index for index, _ in vector.recv()] == [1]
        assert 0 in vector.pending, turn
    assert vector.recv(timeout=0.0) == []
    assert vector.drain()[0][0] == 0


@every_mode
def test_a_stream_plays_every_env_at_its_own_pace(vectors: Any, mode: str):
    vector = vectors(ADDER, n=3, mode=mode, autoreset="off")

    async def policy(index: int, observation: str, info: dict[str, Any]) -> str:
        await asyncio.sleep(0)
        return "end" if observation == f"total {index + 3}" else "1"

    async def play() -> list[tuple[int, str]]:
        return [(index, turn.observation) async for index, turn in vector.stream(policy)]

    seen = asyncio.run(play())
    for index in range(3):
        own = [text for i, text in seen if i == index]
        assert own == [*(f"total {index + k}" for k in (1, 2, 3)), f"end {index + 3}"]


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_a_stream_can_be_broken_off_and_the_vector_used_again(vectors: Any, autoreset: str):
    vector = vectors(ADDER, n=3, mode="threads", autoreset=autoreset)

    async def play() -> int:
        ends = 0
        stream = vector.stream(lambda index, observation, info: "end")
        async for _, turn in stream:
            ends += turn.terminated
            if ends == 7:
                break
        await stream.aclose()
        return ends

    assert asyncio.run(play()) == 7
    vector.reset(seed=0)
    assert vector.step(["1"] * 3)[0] == ["total 1", "total 2", "total 3"]


def test_waiting_envs_wait_together(vectors: Any):
    """Eight envs meet at a barrier inside their steps: one after the other they never would."""
    barrier = threading.Barrier(8)

    class Meet(Wrapper):
        def step(self, action: str) -> Any:
            barrier.wait(timeout=30)
            return self.env.step(action)

    vector = vectors(ADDER, n=8, mode="threads", wrappers=[Meet])
    vector.reset()
    assert vector.step(["1"] * 8)[1].sum() == 8


def test_the_mode_follows_from_the_envs_declarations():
    kinds = {
        "SerialVector": {"env_ids": ADDER},
        "ThreadVector": {"env_ids": [ADDER, WAITER]},
    }
    for kind, arguments in kinds.items():
        with closing(make_vec(**arguments)) as vector:
            assert type(vector).__name__ == kind
    for arguments in ({"async_mode": True}, {"timeout": 5.0}):
        with closing(make_vec(ADDER, **arguments)) as vector:
            assert isinstance(vector, ThreadVector)


@every_mode
def test_fork_and_state_go_on_alike_and_apart(vectors: Any, mode: str):
    vector = vectors(ADDER, n=3, mode=mode, autoreset="next_step")
    vector.reset()
    vector.step(["end", "raise", "4"])  # over, thrown away, running
    state = json.loads(json.dumps(vector.get_state()))
    twin = vector.fork()
    other = vectors(ADDER, n=3, mode=mode, autoreset="next_step")
    other.set_state(state)
    steps = [["1", "1", "1"], ["2", "end", "2"], ["3", "3", "3"]]
    first = [twin.step(actions) for actions in steps]
    for copy in (vector, other):
        for one, again in zip(first, [copy.step(actions) for actions in steps], strict=True):
            assert one[0] == again[0] and one[4] == again[4]
            assert all((one[k] == again[k]).all() for k in (1, 2, 3))
    twin.close()


@every_mode
def test_call_reaches_every_env(vectors: Any, mode: str):
    vector = vectors(ADDER, n=2, mode=mode)
    vector.reset(seed=8)
    assert vector.call("total") == [8, 9]
    actions = vector.call("sample_random_action")
    assert all(1 <= int(action) <= 9 for action in actions)
    assert [task.seed for task in vector.call("task")] == [8, 9]
    with pytest.raises(RuntimeError, match=r"env 0.*AttributeError"):
        vector.call("no_such_method")
    assert vector.step(["1", "1"])[0] == ["total 9", "total 10"]


@every_mode
def test_mistakes_of_the_caller_are_refused(vectors: Any, mode: str):
    vector = vectors(ADDER, n=2, mode=mode)
    with pytest.raises(RuntimeError, match=r"call reset\(\) first"):
        vector.step(["1", "1"])
    vector.reset()
    for actions in (["1"], "12", {5: "1"}, {-1: "1"}):
        with pytest.raises(ValueError, match=r"2 actions|0 to 1"):
            vector.step(actions)
    for seed in (-1, [1], [1, -2]):
        with pytest.raises(ValueError, match="seed"):
            vector.reset(seed=seed)
    vector.close()
    vector.close()
    with pytest.raises(RuntimeError, match="closed"):
        vector.reset()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"mode": "fast"}, "mode='fast'"),
        ({"autoreset": "never"}, "autoreset='never'"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": 1.0, "mode": "serial"}, "cannot interrupt"),
        ({"async_mode": True, "mode": "serial"}, "async_mode"),
        ({"workers": 2}, "no argument 'workers'"),
        ({"n": 0}, "at least one"),
        ({"n": 2, "vec_kwargs": [{}]}, "1 vec_kwargs for 2"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], match: str):
    with pytest.raises(ValueError, match=match):
        make_vec(ADDER, **arguments)


@every_mode
def test_an_env_that_cannot_be_built_is_a_mistake_of_the_caller(mode: str):
    with pytest.raises(ValueError, match="no licence"):
        make_vec([ADDER, f"{TOYS}:Unbuildable"], mode=mode)
    with pytest.raises(ValueError, match="unknown env"):
        make_vec("arithmetics", mode=mode)


WORDS = st.sampled_from(["1", "7", "end", "raise", "exit", "", "é", "9" * 30])


@settings(deadline=None, max_examples=40)
@given(steps=st.lists(st.lists(WORDS, min_size=3, max_size=3), max_size=8), seed=st.integers(0, 9))
def test_threads_give_the_same_trace_as_a_serial_vector(steps: list[list[str]], seed: int):
    traces: list[Any] = []
    for mode in ("serial", "threads"):
        with closing(make_vec(ADDER, n=3, mode=mode, seed=seed)) as vector:
            trace: list[Any] = [vector.reset()]
            for actions in steps:
                observations, rewards, terminated, truncated, infos = vector.step(actions)
                columns = rewards.tolist(), terminated.tolist(), truncated.tolist()
                trace.append((observations, columns, infos))
        traces.append(trace)
    assert traces[0] == traces[1]
