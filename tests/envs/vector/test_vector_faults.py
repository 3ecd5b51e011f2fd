"""Envs that raise, hang, crash or answer late: each is that one env's affair alone."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from graft.envs import make_vec
from tests.envs.vector.toy_envs import Adder

TOYS = "tests.envs.vector.toy_envs"
ADDER = f"{TOYS}:Adder"
ROOT = Path(__file__).parents[3]

every_mode = pytest.mark.parametrize("mode", ["serial", "threads"])


@every_mode
@pytest.mark.parametrize(("word", "error"), [("raise", "KeyError: 'no such luck'"), ("exit", "3")])
def test_an_exception_of_one_env_leaves_the_others_alone(
    vectors: Any, mode: str, word: str, error: str
):
    for autoreset in ("same_step", "next_step", "off"):
        vector = vectors(ADDER, n=3, mode=mode, autoreset=autoreset)
        vector.reset()
        observations, rewards, terminated, truncated, infos = vector.step(["1", word, "1"])
        assert [observations[0], observations[2]] == ["total 1", "total 3"]
        assert truncated.tolist() == [False, True, False] and not terminated.any()
        assert rewards.tolist() == [1.0, 0.0, 1.0]
        assert error in infos[1]["error"] and infos[0] == infos[2] == {}
        if autoreset == "same_step":
            assert observations[1].startswith("start ")
            assert error in infos[1]["final_info"]["error"]
        elif autoreset == "next_step":
            assert vector.step({1: "7"})[0][0].startswith("start ")
        else:
            assert vector.reset(seed=[9], only=[1])[0] == ["start 9"]
        before = vector.step(["1"] * 3)[0]
        assert before[0] == "total 2" and before[2] == "total 4"
        assert before[1].startswith("total ")


def test_what_only_looks_like_an_interrupt_is_the_fault_of_the_env_at_once(vectors: Any):
    vector = vectors(ADDER, n=2, mode="threads", timeout=60.0)
    vector.reset()
    observations, _, _, truncated, infos = vector.step(["1", "cancel"])
    assert observations[0] == "total 1" and truncated.tolist() == [False, True]
    assert infos[1]["error"] == infos[1]["final_info"]["error"] == "CancelledError"
    assert vector.step(["1", "end"])[0][0] == "total 2"
    with pytest.raises(RuntimeError, match="CancelledError"):
        vector.call("respond", "cancel")


@every_mode
def test_the_seeds_after_a_fault_are_fixed_by_the_seed_of_the_vector(vectors: Any, mode: str):
    traces: list[Any] = []
    for _ in range(2):
        vector = vectors(ADDER, n=2, mode=mode, seed=3)
        vector.reset()
        traces.append([vector.step(["raise", "raise"])[0], vector.step(["end", "raise"])[0]])
    assert traces[0] == traces[1] and len(set(traces[0][0])) == 2


def test_a_reset_that_fails_is_tried_again_by_the_next_step(vectors: Any):
    from tests.envs.vector.toy_envs import NoReset

    NoReset.tries = 0
    vector = vectors(f"{TOYS}:NoReset")
    assert vector.reset()[0] == ["start 0"]
    observations, _, terminated, truncated, infos = vector.step(["end"])
    assert observations == [""] and terminated.tolist() == [True]
    assert infos[0]["error"] == "ConnectionError: server is away"
    assert infos[0]["final_observation"] == "end 0"
    observations, _, terminated, truncated, infos = vector.step(["9"])
    assert observations[0].startswith("start ") and not (terminated | truncated).any()


def test_a_step_over_its_time_is_broken_off_and_the_others_answer(vectors: Any):
    vector = vectors(ADDER, n=3, mode="threads", timeout=0.3)
    vector.reset()
    vector.step(["1"] * 3)
    observations, _, terminated, truncated, infos = vector.step(["1", "hang", "1"])
    assert truncated.tolist() == [False, True, False] and not terminated.any()
    assert [observations[0], observations[2]] == ["total 2", "total 4"]
    assert observations[1].startswith("start ")
    assert infos[1]["error"].startswith("TimeoutError: env 1 ") and "0.3 s" in infos[1]["error"]
    assert vector.step({0: "1", 2: "1"})[0] == ["total 3", "total 5"]
    assert vector.step({1: "1"})[0][0].startswith("total ")


def test_an_answer_that_comes_too_late_is_dropped(vectors: Any):
    vector = vectors(ADDER, n=2, mode="threads", timeout=0.3)
    vector.reset()
    late = threads_of(vector)[0]
    assert vector.step(["nap", "1"])[3].tolist() == [True, False]
    late.join(timeout=30)  # by now the late answer is out
    assert not late.is_alive()
    observations, _, _, truncated, _ = vector.step(["1", "1"])
    assert observations[0].startswith("total ") and observations[1] == "total 3"
    assert not truncated.any()


def test_close_ends_the_threads_and_a_hanging_env_does_not_keep_the_program_alive():
    script = (
        "from graft.envs import make_vec\n"
        f"vec = make_vec({ADDER!r}, n=2, timeout=0.2)\n"
        "vec.reset(); print(vec.step(['hang', '1'])[3].tolist()); vec.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[True, False]" and done.returncode == 0, done.stderr
    threads = make_vec(ADDER, n=3, mode="threads")
    names = {thread.name for thread in threading.enumerate()}
    assert "graft-env-0" in names
    threads.close()
    assert not any(thread.is_alive() for thread in threads_of(threads))


def threads_of(vector: Any) -> list[threading.Thread]:
    return [one.thread for one in vector._threads]


@every_mode
def test_an_env_that_cannot_be_built_closes_those_before_it(
    mode: str, monkeypatch: pytest.MonkeyPatch
):
    closed: list[int] = []
    monkeypatch.setattr(Adder, "close", lambda self: closed.append(self.add))
    with pytest.raises(ValueError, match="no licence for this env"):
        make_vec(
            [ADDER, ADDER, f"{TOYS}:Unbuildable"],
            vec_kwargs=[{"add": 1}, {"add": 2}, {}],
            mode=mode,
        )
    assert closed == [1, 2]
