"""A real Ray cluster on this machine: whichever process dies, the numbers are those of one process."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from graft.cluster.collector import RayCollector
from graft.cluster.learner import Finished
from graft.cluster.ray_import import ray_module
from graft.cluster.supervisor import train_on_cluster
from graft.config import Config, ConfigError, load_config
from graft.rollout.collector import RolloutRequest
from graft.train.errors import RunStopped
from graft.train.monitor.display import Display
from tests.training import train_recipe

try:
    ray_module()  # not importorskip: what quietens Ray is set before it is imported
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LETTERS = '''
import os, sys, time
from pathlib import Path

from graft.envs.base import BaseEnv
from graft.types import Turn

IN_WORKER = "graft.cluster.rollout_worker" in sys.modules and "graft.cluster.learner" not in sys.modules


class Letters(BaseEnv):
    """Write the letter of the prompt; the reward is its share.

    In the folder `busy` lies a file for each attempt that is answered; while `hold` lies there too,
    none of them comes to its end.
    """

    alphabet = "abcd="
    blocking = True

    def __init__(self, busy="", wrong=""):
        super().__init__()
        self.busy = busy
        if wrong == "value" and IN_WORKER:
            from graft.config import ConfigError
            raise ConfigError("wrong=value: letters are out")
        if wrong == "module" and IN_WORKER:
            from graft.registry import load
            load("no_such_package:Letters", "env")
        if wrong == "exit" and IN_WORKER:
            os._exit(3)

    def pose(self):
        self.answer = self.rng.choice("abcd")
        return self.answer + "="

    def respond(self, action):
        if self.busy:
            mark = Path(self.busy) / f"{os.getpid()}-{id(self)}"
            mark.touch()
            time.sleep(0.05)
            while (Path(self.busy) / "hold").exists():
                time.sleep(0.02)
            mark.unlink(missing_ok=True)
        return Turn("", action.count(self.answer) / max(1, len(action)), terminated=True)
'''
RECIPE = """
run: {save_every: 3, eval_tasks: 6, trackers: [], log_episodes: 1, seed: 3}
model:
  shape: {width: 32, layers: 1, heads: 2, kv_heads: 1, head_dim: 16, ff: 32, max_positions: 32}
task: {env: "letters:Letters"}
rollout: {tasks: 4, samples: 4, max_tokens: 6, max_turns: 1, max_context: 24}
algo: {name: grpo}
train: {steps: 9, lr: 3.0e-3, warmup: 1}
"""
STEPS, TASKS, SAMPLES = 9, 4, 4
MAY_DIFFER = re.compile(
    "time|per_second|drafts|difference|redone|discarded|workers|steps_waiting|ratio/|sampling/exact"
)
"""Seconds, the engine's distance from the learner (how many sample together is chance, and split weights
add in another order), and counts."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with an environment and a recipe of our own."""
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "letters.py").write_text(LETTERS)
    (folder / "letters.yaml").write_text(RECIPE)
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)
    sys.path[:] = [entry for entry in sys.path if entry != str(folder)]


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[Any]:
    """Machines that are processes; the first has room for four."""
    ray = ray_module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.cluster_utils import Cluster

        machines = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False}
        )
        ray.init(address=machines.address, log_to_driver=False, logging_level="ERROR")
    yield machines
    ray.shutdown()
    machines.shutdown()


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    """The same run by one process."""
    train_recipe("letters.yaml", f"run.dir={place}", "run.name=alone")
    return place / "alone"


class Run:
    """A run on a thread of its own, so that a test can disturb it."""

    def __init__(self, place: Path, name: str, *overrides: str) -> None:
        self.folder = place / name
        self.busy = place / f"{name}-busy"
        self.busy.mkdir()
        args = f"task.args={{busy: {self.busy}}}"
        given = (f"run.dir={place}", f"run.name={name}", args, "cluster.address=here")
        self.config: Config = load_config("letters.yaml", (*given, *overrides))
        self.screen = StringIO()
        self.found: Finished | BaseException | None = None
        self.thread = threading.Thread(target=self._train)
        self.thread.start()

    def _train(self) -> None:
        try:
            self.found = train_on_cluster(
                self.config, Display(self.config.train.steps, stream=self.screen)
            )
        except BaseException as error:
            self.found = error

    def until(self, holds: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + 240
        while time.monotonic() < end:
            if found := holds():
                return found
            assert self.thread.is_alive(), f"{what}: over before: {self.found}\n{self.text}"
            time.sleep(0.02)
        raise AssertionError(f"waited for {what}:\n{self.text}")

    def until_step(self, step: int) -> None:
        self.until(lambda: len(metrics(self.folder)) >= step, f"step {step}")

    def hold(self) -> int:
        """Let no attempt end; the process of a worker that is in the middle of one."""
        (self.busy / "hold").touch()
        time.sleep(0.2)

        def find() -> int:
            pids = [int(mark.name.partition("-")[0]) for mark in self.busy.glob("*-*")]
            return next((pid for pid in pids if Path(f"/proc/{pid}").exists()), 0)

        return self.until(find, "a worker that is busy")

    def let_go(self) -> None:
        (self.busy / "hold").unlink()

    def lines(self, pattern: str) -> list[str]:
        return [line for line in self.text.splitlines() if re.search(pattern, line)]

    @property
    def text(self) -> str:
        return self.screen.getvalue()

    def finish(self) -> dict[str, Any]:
        self.thread.join(300)
        assert isinstance(self.found, Finished), f"{self.found!r}\n{self.text}"
        return self.found.summary


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Of steps whose line is whole."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def assert_same(run: Path, alone: Path) -> None:
    """The same steps with the same numbers, and every task of every step there once."""
    mine, theirs = metrics(run), metrics(alone)
    assert (
        [row["step"] for row in mine] == [row["step"] for row in theirs] == [*range(1, STEPS + 1)]
    )
    for row, expected in zip(mine, theirs, strict=True):
        names = {name for name in expected if not MAY_DIFFER.search(name)}
        assert {"reward", "loss", "grad_norm", "entropy"} <= names
        for name in names - {"phase"}:
            assert row[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name
    assert tasks_of(run) == tasks_of(alone)
    scores = [json.loads((path / "summary.json").read_text()) for path in (run, alone)]
    assert scores[0]["after"] == pytest.approx(scores[1]["after"])


def tasks_of(run: Path) -> list[list[tuple[str, int]]]:
    """Of each step: its tasks and the number of attempts at each."""
    files = sorted((run / "episodes").glob("step_*.jsonl"))
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [[(row["task"]["id"], len(row["leaves"])) for row in episodes] for episodes in rows]


def counted(run: Path, name: str) -> float:
    return sum(row.get(name, 0.0) for row in metrics(run))


def test_the_run_to_compare_with_learns_something(alone: Path) -> None:
    rewards = [row["reward"] for row in metrics(alone)]
    assert max(rewards) > rewards[0] + 0.05
    assert all(row["grad_norm"] > 0 for row in metrics(alone))
    listed = tasks_of(alone)
    assert [len(step) for step in listed] == [TASKS] * STEPS
    assert len({task for step in listed for task, _ in step}) == TASKS * STEPS
    assert all(attempts == SAMPLES for step in listed for _, attempts in step)


@pytest.fixture(scope="module")
def disturbed(place: Path, cluster: Any, alone: Path) -> Run:
    """One worker is killed, one is stopped, and their number changes, all in one run."""
    from graft.commands.scale import scale

    run = Run(place, "disturbed", "cluster.workers=2", "parallel.deadline=6")
    run.until_step(1)
    run.killed = run.hold()
    os.kill(run.killed, signal.SIGKILL)
    run.until(lambda: run.lines(f"pid {run.killed} .*is lost"), "a note about the killed worker")
    run.until(lambda: len(run.lines("is ready")) >= 3, "the first replacement")
    run.let_go()
    run.until_step(3)
    run.stopped = run.hold()
    os.kill(run.stopped, signal.SIGSTOP)
    run.until(lambda: run.lines(f"pid {run.stopped} .*is lost"), "a note about the stopped worker")
    scale(str(run.folder), 3)
    run.until(lambda: len(run.lines("is ready")) >= 5, "three workers")
    run.let_go()
    run.until_step(6)
    run.hold()
    scale(str(run.folder), 1)
    run.until(lambda: len(run.lines("gets no more tasks")) == 2, "two workers that go")
    run.let_go()
    run.finish()
    return run


def test_dead_workers_change_no_number_and_lose_no_task(disturbed: Run, alone: Path) -> None:
    assert_same(disturbed.folder, alone)


def test_each_lost_worker_is_named_with_what_it_had(disturbed: Run) -> None:
    (killed,) = disturbed.lines(f"pid {disturbed.killed} .*is lost")
    (stopped,) = disturbed.lines(f"pid {disturbed.stopped} .*is lost")
    assert "was killed" in killed
    assert "has not answered for 6 s" in stopped
    done_again = 0
    for line in (killed, stopped):
        found = re.search(r"its (?:(\d+) )?episodes? (?:is|are) repeated", line)
        assert found, line
        done_again += int(found[1] or 1)
    assert counted(disturbed.folder, "rollout/redone") == done_again > 0


def test_the_number_of_workers_follows_the_file(disturbed: Run) -> None:
    numbers = [row["rollout/workers"] for row in metrics(disturbed.folder)]
    assert max(numbers) == 3
    assert numbers[-1] == 1
    assert not Path(f"/proc/{disturbed.killed}").exists()


def test_nothing_of_rays_own_is_on_the_screen(disturbed: Run) -> None:
    assert not disturbed.lines(r"raylet|ray::|actor|Traceback|\x1b")


def test_broadcast_gives_the_same_numbers_also_when_a_worker_dies(
    place: Path, cluster: Any, alone: Path
) -> None:
    run = Run(
        place, "broadcast", "cluster.workers=2", "cluster.sync=broadcast", "parallel.deadline=20"
    )
    run.until_step(2)
    killed = run.hold()
    os.kill(killed, signal.SIGKILL)
    run.until(lambda: run.lines(f"pid {killed} .*is lost"), "a note about the killed worker")
    run.let_go()
    run.finish()
    assert_same(run.folder, alone)
    assert counted(run.folder, "rollout/redone") > 0
    assert run.lines(f"pid {killed} .*is lost")


def learners() -> list[int]:
    """Processes of this machine that Ray calls learners."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                title = (entry / "cmdline").read_bytes()
                if title.startswith(b"ray::LearnerActor"):
                    found.append(int(entry.name))
    return sorted(found)


def test_a_dead_learner_goes_on_from_its_last_checkpoint(
    place: Path, cluster: Any, alone: Path
) -> None:
    run = Run(place, "relearned", "cluster.workers=1", "cluster.restarts=1")
    run.until_step(5)
    (learner,) = learners()
    os.kill(learner, signal.SIGKILL)
    run.finish()
    assert_same(run.folder, alone)
    assert run.lines("a learner died: its process was killed")
    assert run.lines("resuming .* after rl step 3")


def test_learners_that_die_more_often_than_allowed_end_the_run(place: Path, cluster: Any) -> None:
    run = Run(place, "hopeless", "cluster.restarts=0")
    run.until_step(1)
    os.kill(learners()[0], signal.SIGKILL)
    run.thread.join(120)
    assert isinstance(run.found, RunStopped)
    assert "a learner died once (cluster.restarts=0)" in str(run.found)
    assert "the same command resumes" in str(run.found)


def test_two_learners_give_the_same_numbers_also_when_the_second_dies(
    place: Path, cluster: Any, alone: Path
) -> None:
    run = Run(place, "two", "cluster.learners=2", "parallel.deadline=60")
    run.until_step(4)
    os.kill(learners()[1], signal.SIGKILL)
    run.finish()
    assert_same(run.folder, alone)
    assert run.lines("a learner died")


def test_a_machine_that_leaves_takes_no_episode_with_it(
    place: Path, cluster: Any, alone: Path
) -> None:
    # 4 CPUs have room for the learner and one worker; the other lies on the machine that leaves
    machine = cluster.add_node(num_cpus=2)
    try:
        cluster.wait_for_nodes()
        run = Run(place, "left", "cluster.workers=2", "cluster.cpus=2", "parallel.deadline=10")
        run.hold()
        run.until(lambda: len(run.lines("is ready")) == 2, "both workers")
        run.let_go()
        run.until_step(2)
        run.hold()
    finally:
        cluster.remove_node(machine)
    run.until(lambda: run.lines("is lost"), "a note about the worker on it")
    run.let_go()
    run.finish()
    assert_same(run.folder, alone)
    assert len(run.lines("is lost")) == 1
    assert counted(run.folder, "rollout/redone") > 0


def test_working_ahead_on_a_cluster_trains_on_every_task_once(
    place: Path, cluster: Any, alone: Path
) -> None:
    run = Run(place, "ahead", "cluster.workers=2", "rollout.staleness=1")
    run.finish()
    rows = metrics(run.folder)
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert max(row["staleness/max"] for row in rows) <= 1
    assert sum(row["staleness/mean"] for row in rows) > 0
    assert tasks_of(run.folder) == tasks_of(alone)


def command(place: Path, address: str, *overrides: str, **more: Any) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    given = (f"run.dir={place}", f"cluster.address={address}", *overrides)
    return subprocess.Popen(
        [sys.executable, "-m", "graft", "train", "letters.yaml", *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=place,
        env=environment,
        **more,
    )


def test_what_is_wrong_in_a_worker_is_all_that_is_on_the_screen(place: Path, cluster: Any) -> None:
    process = command(place, cluster.address, "run.name=wrong", "task.args={wrong: value}")
    text, _ = process.communicate(timeout=200)
    host = re.escape(socket.gethostname())
    expected = (
        rf"graft: worker 0 \(pid \d+ on {host}\) cannot start: env 'letters:Letters': Letters "
        r"\(letters.py:\d+\) raised ConfigError: wrong=value: letters are out at letters.py:\d+ .*"
    )
    shown = text.removeprefix("graft train: loading libraries\n")  # on a slow machine
    assert re.fullmatch(expected, shown.strip()), text
    assert process.returncode == 1


def test_what_is_wrong_in_the_learner_is_a_mistake_of_usage(place: Path, cluster: Any) -> None:
    given = [f"run.dir={place}", "run.name=usage", "cluster.address=here", "task.env=no_such:Env"]
    screen = StringIO()
    with pytest.raises(ConfigError, match="cannot import 'no_such'"):
        train_on_cluster(load_config("letters.yaml", given), Display(1, stream=screen))
    assert not screen.getvalue()


def test_a_package_that_only_workers_lack_is_named(place: Path, cluster: Any) -> None:
    config = load_config("letters.yaml", ["task.args={wrong: module}", "cluster.address=here"])
    notes: list[str] = []
    collector = RayCollector(config, place / "nowhere", notes.append, str(place))
    try:
        with pytest.raises(RunStopped, match=r"worker 0 .* cannot import 'no_such_package'"):
            collector.wait()
        with pytest.raises(RunStopped, match="no_such_package"):
            collector.submit(RolloutRequest([], "nothing"))
    finally:
        collector.close()
    assert not notes


def test_a_worker_that_dies_at_every_start_ends_the_run_with_its_cause(
    place: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graft.cluster.collector.MAX_FAILED_STARTS", 0)
    config = load_config("letters.yaml", ["task.args={wrong: exit}", "cluster.address=here"])
    notes: list[str] = []
    collector = RayCollector(config, place / "nowhere", notes.append, str(place))
    try:
        with pytest.raises(RunStopped, match=r"2 workers died .* was killed"):
            collector.wait()
    finally:
        collector.close()
    assert len(notes) == 2


@pytest.mark.parametrize(
    ("setting", "capacity"),
    [("cluster.workers=4", "can place 4"), ("cluster.cpus=5", "can place 0")],
)
def test_more_than_the_cluster_has_is_refused_at_once(
    place: Path, cluster: Any, setting: str, capacity: str
) -> None:
    config = load_config(
        "letters.yaml", [f"run.dir={place}", "run.name=many", "cluster.address=here", setting]
    )
    started = time.monotonic()
    with pytest.raises(RunStopped, match=capacity):
        train_on_cluster(config, Display(1, quiet=True))
    assert time.monotonic() - started < 30
    assert not (place / "many").exists()


def descendants(pid: int) -> set[int]:
    """Of a process, itself included, whatever group they have moved to."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def test_ctrl_c_finishes_the_step_and_leaves_nothing_behind(place: Path, alone: Path) -> None:
    busy = place / "stopped-busy"
    busy.mkdir()
    given = ("run.name=stopped", f"task.args={{busy: {busy}}}", "run.save_every=0")
    process = command(place, "local", *given, "cluster.cpus=0.5", start_new_session=True)
    end = time.monotonic() + 240
    while len(metrics(place / "stopped")) < 2 and time.monotonic() < end:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    family = descendants(process.pid)
    assert len(family) > 4
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: all processes get it
    text, _ = process.communicate(timeout=200)
    assert process.returncode == 130, text
    assert "the progress is saved" in text
    assert "Traceback" not in text
    done = len(metrics(place / "stopped"))
    assert 2 <= done < STEPS
    (newest,) = (place / "stopped" / "checkpoints").glob(f"*{done:06d}")
    assert (newest / "state.json").exists()
    end = time.monotonic() + 10
    while (left := {pid for pid in family if Path(f"/proc/{pid}").exists()}) and (
        time.monotonic() < end
    ):
        time.sleep(0.1)
    assert not left


def test_the_command_goes_on_after_ctrl_c_and_closes_as_any_run_does(
    place: Path, cluster: Any, alone: Path
) -> None:
    """Behind the test above: the same folder, another cluster."""
    busy = place / "stopped-busy"
    given = ("run.name=stopped", f"task.args={{busy: {busy}}}", "run.save_every=0")
    process = command(place, cluster.address, *given)
    text, _ = process.communicate(timeout=240)
    assert process.returncode == 0, text
    assert_same(place / "stopped", alone)
    assert "resuming" in text
    lines = text.splitlines()
    assert any(re.search("held out +before +after +change", line) for line in lines)
    assert "held-out attempt 3" in lines
    assert f"run folder: {place / 'stopped'}" in lines
    assert any("graft rollout" in line for line in lines[-2:])
    assert not re.search(r"raylet|ray::|Warning|\x1b", text)
