"""An environment that hangs on the event loop: its name, the line, and a signal that still ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from graft.rollout import event_loop as stall
from graft.rollout.async_collector import AsyncCollector
from graft.rollout.branches.branch import independent
from graft.rollout.collect import collect
from graft.rollout.collector import CollectorConfig, RolloutRequest
from graft.types import Task
from tests.command_line import graft
from tests.rollout.test_episode_builder import Echo, make_setup

TASKS = [Task("t", "echo", seed=1)]


class Sleeping(Echo):
    """Waits in the middle of a turn, on the event loop."""

    def __init__(self, seconds: float = 0.9) -> None:
        super().__init__()
        self.sleeps = seconds

    def respond(self, action: str):
        time.sleep(self.sleeps)
        return super().respond(action)


class Endless(Echo):
    def respond(self, action: str):
        while True:
            pass


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stall, "BEAT", 0.02)
    monkeypatch.setattr(stall, "REPORT_AFTER", 0.3)
    monkeypatch.setattr(stall, "GRACE", 0.3)


def short(env=Sleeping, **changes):
    from graft.types import Sampling

    return make_setup(env, sampling=Sampling(max_tokens=64), **changes)


def test_the_line_that_blocks_the_event_loop_is_named(capsys: pytest.CaptureFixture[str]):
    collect(TASKS, short(), independent(1))
    stderr = capsys.readouterr().err
    assert "an environment blocks the rollout event loop since" in stderr
    assert "tests/rollout/test_stall.py:" in stderr and "in respond" in stderr
    assert "Set `blocking = True` on its class" in stderr


def test_what_blocks_on_a_thread_is_not_reported(capsys: pytest.CaptureFixture[str]):
    class OnThread(Sleeping):
        blocking = True

    collect(TASKS, short(OnThread), independent(1))
    assert capsys.readouterr().err == ""


def test_a_reward_that_blocks_is_called_one(capsys: pytest.CaptureFixture[str]):
    def slow_reward(task, row):
        time.sleep(0.7)
        return 1.0

    collect(TASKS, short(lambda: Sleeping(0.0), reward=slow_reward), independent(1))
    assert "a reward blocks the rollout event loop" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("env", [Endless, lambda: Sleeping(1e6)])
def test_a_signal_ends_code_that_never_gives_the_loop_back(env, number: signal.Signals):
    from graft.train.run_dir.interrupt import Interrupt

    started = time.monotonic()
    before = signal.getsignal(signal.SIGINT)
    threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
    with Interrupt(), pytest.raises(KeyboardInterrupt):
        collect(TASKS, short(env), independent(1))
    assert time.monotonic() - started < 30.0
    assert signal.getsignal(signal.SIGINT) == before


def test_a_thread_that_hangs_is_left_behind_when_the_collector_closes():
    release = threading.Event()

    class Held(Echo):
        def respond(self, action: str):
            release.wait(60.0)
            return super().respond(action)

    hangs = short(Held)
    collector = AsyncCollector(CollectorConfig(hangs, hangs, independent(1)))
    collector.submit(RolloutRequest(TASKS, "a step"))
    time.sleep(1.0)
    started = time.monotonic()
    collector.close()
    assert time.monotonic() - started < 20.0
    release.set()  # a thread that still hangs is reported in the output of later tests
    while any(thread.name == "graft-rollouts" for thread in threading.enumerate()):
        assert time.monotonic() - started < 60.0
        time.sleep(0.05)


HANGING = """
import time
from graft.envs.base import BaseEnv
from graft.types import Turn


class Hangs(BaseEnv):
    alphabet = "0123456789?hl"
    stop = tuple(alphabet)

    def pose(self):
        return "?"

    def respond(self, action):
        {hang}
        return Turn(reward=1.0, terminated=True)
"""
RECIPE = """
run: {{dir: "{folder}", name: run, eval_tasks: 0, trackers: []}}
model:
  shape: {{width: 16, layers: 1, heads: 2, kv_heads: 1, head_dim: 8, ff: 16, max_positions: 96}}
task: {{env: "hangs:Hangs"}}
rollout: {{tasks: 1, samples: 2, max_tokens: 4, max_context: 64, staleness: {staleness}}}
train: {{steps: 2}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hang", "staleness"),  # the first two are ended in the main thread by a quick test above
    [("while True: pass", 1), ("time.sleep(1e6)", 1), ("swallow", 0), ("swallow", 1)],
)
def test_a_run_that_hangs_names_the_line_and_a_signal_ends_it(
    hang: str, staleness: int, tmp_path: Path
):
    swallow = (
        "while True:\n            try:\n                time.sleep(0.01)\n"
        "            except BaseException:\n                pass"
    )
    code = HANGING.format(hang=swallow if hang == "swallow" else hang)
    (tmp_path / "hangs.py").write_text(code)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(folder=tmp_path, staleness=staleness))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    process = subprocess.Popen(
        [sys.executable, "-m", "graft", "train", "recipe.yaml"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )
    assert process.stderr is not None
    stderr = ""
    for line in process.stderr:
        stderr += line
        if "blocks the rollout event loop" in line:
            break
    assert "hangs.py:" in stderr and "in respond" in stderr, stderr
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=200)[
        1
    ]  # seconds on a quiet machine; without a signal, never
    assert process.returncode == 130, rest
    assert "Traceback" not in rest and "Task was destroyed" not in rest, rest
    (tmp_path / "hangs.py").write_text(HANGING.format(hang="pass"))
    again = graft("train", "recipe.yaml", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
