"""Envs that raise, hang, crash or answer late: each is that one env's affair alone."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from graft.envs.vector import make_vec, processes
from tests.envs.vector.toy_envs import Adder
from tests.held import open_files

TOYS = "tests.envs.vector.toy_envs"
ADDER = f"{TOYS}:Adder"
ROOT = Path(__file__).parents[3]

every_mode = pytest.mark.parametrize("mode", ["serial", "threads", "processes"])
interruptible = pytest.mark.parametrize("mode", ["threads", "processes"])


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


@interruptible
def test_what_only_looks_like_an_interrupt_is_the_fault_of_the_env_at_once(vectors: Any, mode: str):
    vector = vectors(ADDER, n=2, mode=mode, timeout=60.0)
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


@interruptible
def test_a_step_over_its_time_is_broken_off_and_the_others_answer(vectors: Any, mode: str):
    vector = vectors(ADDER, n=3, mode=mode, timeout=0.3)
    vector.reset()
    vector.step(["1"] * 3)
    observations, _, terminated, truncated, infos = vector.step(["1", "hang", "1"])
    assert truncated.tolist() == [False, True, False] and not terminated.any()
    assert [observations[0], observations[2]] == ["total 2", "total 4"]
    assert observations[1].startswith("start ")
    assert infos[1]["error"].startswith("TimeoutError: env 1 ") and "0.3 s" in infos[1]["error"]
    assert vector.step({0: "1", 2: "1"})[0] == ["total 3", "total 5"]
    assert vector.step({1: "1"})[0][0].startswith("total ")


@interruptible
def test_an_answer_that_comes_too_late_is_dropped(vectors: Any, mode: str):
    vector = vectors(ADDER, n=2, mode=mode, timeout=0.3)
    vector.reset()
    threads = sitters(vector) if mode == "threads" else []
    assert vector.step(["nap", "1"])[3].tolist() == [True, False]
    for thread in threads[:1]:
        thread.join(timeout=30)  # by now the late answer is out
        assert not thread.is_alive()
    observations, _, _, truncated, _ = vector.step(["1", "1"])
    assert observations[0].startswith("total ") and observations[1] == "total 3"
    assert not truncated.any()


@pytest.mark.parametrize("word", ["spin", "die"])
@pytest.mark.parametrize("autoreset", ["same_step", "next_step", "off"])
def test_an_env_that_takes_its_process_down_loses_nobody_elses_episode(
    vectors: Any, word: str, autoreset: str
):
    """Even one C function that never returns, and with all envs in the same process."""
    vector = vectors(ADDER, n=4, mode="processes", timeout=0.5, autoreset=autoreset)
    vector.reset(seed=60)
    vector.step(["1", "1", "1", "end"])  # env 3 stands after an end
    after_end = vector.fork()
    expected = after_end.step({3: "2"})
    observations, _, _, truncated, infos = vector.step({0: "1", 1: word, 2: "1"})
    assert [observations[0], observations[2]] == ["total 62", "total 64"]
    assert truncated.tolist() == [False, True, False]
    assert infos[1]["error"] and infos[0] == infos[2] == {}
    assert vector.step({0: "1", 2: "1"})[0] == ["total 63", "total 65"]
    assert vector.step({3: "2"})[0] == expected[0]
    assert vector.get_state()[0]["env"]["seed"] == 60
    after_end.close()


def test_an_episode_whose_seed_nobody_knows_is_reported_lost(vectors: Any):
    vector = vectors(ADDER, n=2, mode="processes", tells_seed=False)
    vector.reset(seed=1)
    vector.step(["end", "1"])  # env 0 is now in an episode of unknown seed, env 1 in a known one
    observations, _, _, truncated, infos = vector.step(["1", "die"])
    assert truncated.tolist() == [True, True]
    assert "ended" in infos[0]["error"] and observations[0].startswith("start ")
    assert vector.step(["1", "1"])[3].tolist() == [False, False]


def test_a_result_that_cannot_travel_is_the_fault_of_its_env(vectors: Any):
    vector = vectors(ADDER, n=2, mode="processes")
    vector.reset()
    observations, _, _, truncated, infos = vector.step(["object", "1"])
    assert truncated.tolist() == [True, False] and observations[1] == "total 2"
    assert "pickle" in infos[0]["error"] and observations[0].startswith("start ")


def test_workers_end_with_a_parent_that_is_killed_even_inside_a_c_function(tmp_path: Path):
    script = (
        "import sys; from graft.envs.vector import make_vec\n"
        f"vec = make_vec({ADDER!r}, n=4, mode='processes', workers=2)\n"
        "vec.reset(); vec.send({0: 'spin', 1: 'hang'})\n"
        "print(*[worker.process.pid for worker in vec._workers], flush=True)\n"
        "vec.recv()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.5)  # let them get into their steps
    assert all(is_running(pid) for pid in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    ends = time.monotonic() + 20
    while any(is_running(pid) for pid in pids) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_close_ends_threads_and_processes_and_a_hanging_env_does_not_keep_us():
    script = (
        "from graft.envs.vector import make_vec\n"
        f"vec = make_vec({ADDER!r}, n=2, timeout=0.2)\n"
        "vec.reset(); print(vec.step(['hang', '1'])[3].tolist()); vec.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[True, False]" and done.returncode == 0, done.stderr
    vector = make_vec(ADDER, n=3, mode="processes", workers=2)
    pids = [worker.process.pid for worker in vector._workers]  # pyright: ignore
    vector.close()
    assert not any(is_running(pid) for pid in pids)
    threads = make_vec(ADDER, n=3, mode="threads")
    names = {thread.name for thread in threading.enumerate()}
    assert "graft-env-0" in names
    threads.close()
    assert not any(thread.is_alive() for thread in sitters(threads))


def sitters(vector: Any) -> list[threading.Thread]:
    return [sitter.thread for sitter in vector._sitters]


@pytest.mark.skipif(sys.platform != "linux", reason="counts the files of this process in /proc")
def test_a_second_worker_that_cannot_be_started_ends_the_first(monkeypatch: pytest.MonkeyPatch):
    before, started, popen = open_files(), [], subprocess.Popen

    def one(*args: Any, **kwargs: Any) -> Any:
        if started:
            raise OSError(11, "Resource temporarily unavailable")
        started.append(popen(*args, **kwargs))
        return started[0]

    monkeypatch.setattr(processes.subprocess, "Popen", one)
    with pytest.raises(OSError, match="temporarily unavailable") as caught:
        make_vec(ADDER, n=4, mode="processes", workers=2)
    assert open_files() == before, caught.value  # which still holds the frames that failed
    assert started[0].returncode is not None


@pytest.mark.parametrize("mode", ["serial", "threads"])
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
