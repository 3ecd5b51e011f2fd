"""Which worker has which task, and whose result counts: the collector of a cluster, on a fake Ray."""

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from graft.cluster import collector as module
from graft.cluster.collector import RayCollector
from graft.cluster.ray_import import cause_of, ray_module
from graft.cluster.rollout_worker import AttemptResult
from graft.cluster.scale_file import SCALE
from graft.cluster.shared_collector import SharedCollector
from graft.cluster.supervisor import check_capacity
from graft.cluster.weight_transfer import BroadcastGroup
from graft.cluster.worker import ClusterWorker
from graft.config import Config, ConfigError, check
from graft.files import write_text
from graft.rollout.collector import RolloutRequest
from graft.train.errors import RunStopped
from graft.types import Episode, Task


class Died(Exception):
    """As Ray's RayError."""


class Reference:
    """A pending answer."""

    def __init__(self, value: Any = None, is_there: bool = False) -> None:
        self.value, self.is_there = value, is_there

    def answer(self, value: Any) -> None:
        if not self.is_there:
            self.value, self.is_there = value, True


class Method:
    def __init__(self, actor: "Actor", name: str) -> None:
        self.actor, self.name = actor, name

    def remote(self, *values: Any) -> Reference:
        return self.actor.call(self.name, values)


class Actor:
    """A worker's process. It answers at once, except to tasks: the test calls `finish`."""

    def __init__(self, ray: "FakeRay", number: int) -> None:
        self.ray, self.number = ray, number
        self.open: list[Reference] = []
        self.attempts: dict[str, Reference] = {}
        self.loaded: list[int] = []
        self.is_dead = self.is_frozen = False

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

    def call(self, name: str, values: tuple[Any, ...]) -> Reference:
        reference = Reference()
        self.open.append(reference)
        if self.is_dead:
            reference.answer(Died("The actor is dead because its worker process has died."))
        elif name == "attempt":
            self.attempts[values[0].id] = reference
        elif not self.is_frozen:
            reference.answer(self.ray.answers.get(name, self.plain)(self, name, values))
        return reference

    def plain(self, actor: "Actor", name: str, values: tuple[Any, ...]) -> Any:
        if name == "load":
            self.loaded.append(values[1])
        return f"pid {self.number}" if name == "process" else ""

    def finish(self, *ids: str) -> None:
        for name in ids:
            self.attempts.pop(name).answer(AttemptResult(episode(name)))

    def die(self) -> None:
        self.is_dead = True
        for reference in self.open:
            reference.answer(Died("The actor is dead because its worker process has died."))


class FakeRay:
    """As much of Ray as the collector uses."""

    exceptions = SimpleNamespace(RayError=Died)
    util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    def __init__(self) -> None:
        self.actors: list[Actor] = []
        self.answers: dict[str, Callable[[Actor, str, tuple[Any, ...]], Any]] = {}
        self.on_get: Callable[[Reference], None] | None = None
        self.stalls = False
        """Whether the calling process is suspended in its next wait, longer than any deadline."""

    def remote(self, made: type) -> Any:
        def make(number: int, folder: str) -> Actor:
            self.actors.append(Actor(self, number))
            return self.actors[-1]

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=make))

    def put(self, value: Any) -> Reference:
        return Reference(value, is_there=True)

    def wait(self, references: list[Reference], num_returns: int, timeout: float) -> Any:
        if self.stalls and timeout:
            time.sleep(1.0)
            self.stalls = False
            return [], references
        end = time.monotonic() + timeout
        while True:
            done = [one for one in references if one.is_there]
            if len(done) >= num_returns or time.monotonic() >= end:
                return done, [one for one in references if one not in done]
            time.sleep(0.001)

    def get(self, reference: Reference, timeout: float) -> Any:
        if self.on_get is not None:
            self.on_get(reference)
        assert reference.is_there
        if isinstance(reference.value, Exception):
            raise reference.value
        return reference.value

    def kill(self, actor: Actor) -> None:
        actor.die()

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True}]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}


def episode(name: str) -> Episode:
    return Episode(Task(name, "env"), [], [])


def recipe(**sections: dict[str, Any]) -> Config:
    shape = {"width": 8, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 8, "ff": 8}
    base: dict[str, Any] = {"model": {"shape": shape}, "task": {"env": "calculator"}}
    return check({**base, "cluster": {"address": "here", "workers": 2}, **sections})


class Kit:
    """A collector on the fake Ray."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.ray, self.notes = FakeRay(), list[str]()
        self.folder, self.config = folder, config
        self.collectors: list[RayCollector] = []

    def collector(self, **sections: dict[str, Any]) -> RayCollector:
        collector = RayCollector(
            recipe(**sections) if sections else self.config, self.folder, self.notes.append
        )
        self.collectors.append(collector)
        return collector

    def until(self, holds: Callable[[], Any]) -> Any:
        end = time.monotonic() + 5
        while time.monotonic() < end:
            if found := holds():
                return found
            time.sleep(0.002)
        raise AssertionError(f"the condition was not met; notes: {self.notes}")

    def having(self, *ids: str) -> Actor:
        """The living worker that has just these tasks."""
        return self.until(
            lambda: next(
                (a for a in self.ray.actors if not a.is_dead and set(a.attempts) == set(ids)), None
            )
        )

    def ready(self, count: int) -> None:
        self.until(lambda: sum("is ready" in line for line in self.notes) >= count)


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kit]:
    kit = Kit(tmp_path, recipe())
    monkeypatch.setattr(module, "ray_module", lambda: kit.ray)
    monkeypatch.setattr(module, "POLL", 0.01)
    yield kit
    for collector in kit.collectors:
        collector.close()


def request(*ids: str) -> RolloutRequest:
    return RolloutRequest([Task(name, "env") for name in ids], "some episodes")


def names(episodes: list[Episode]) -> list[str]:
    return [one.task.id for one in episodes]


def test_what_a_dead_worker_had_is_done_again_once_and_in_its_place(kit: Kit) -> None:
    collector = kit.collector()
    kit.ready(2)
    pending = collector.submit(request("a", "b", "c", "d"))
    first, second = kit.having("a", "c"), kit.having("b", "d")
    second.finish("b")
    kit.until(lambda: len(collector.workers[1].running) == 1)
    second.die()
    survivor = kit.having("a", "c", "d")
    assert survivor is first
    survivor.finish("d", "c", "a")
    assert names(pending.result()) == ["a", "b", "c", "d"]
    assert any(
        "worker 1 (pid 1) is lost" in line and "its episode is repeated" in line
        for line in kit.notes
    )
    kit.ready(3)
    counts = collector.counts()
    assert counts["rollout/redone"] == 1.0
    assert counts["rollout/workers"] == 2.0
    assert collector.counts()["rollout/redone"] == 0.0


def test_lost_tasks_go_before_those_that_wait(kit: Kit) -> None:
    collector = kit.collector(rollout={"concurrency": 1}, cluster={"address": "here", "workers": 1})
    kit.ready(1)
    pending = collector.submit(request("a", "b"))
    kit.having("a").die()
    kit.having("a").finish("a")
    kit.having("b").finish("b")
    assert names(pending.result()) == ["a", "b"]


def test_an_episode_that_arrives_while_its_worker_is_removed_counts_once(kit: Kit) -> None:
    """The thread that sends weights may remove a worker at any moment."""
    collector = kit.collector()
    kit.ready(2)
    pending = collector.submit(request("a", "b"))
    first = kit.having("a")
    kit.having("b").finish("b")
    reference = first.attempts["a"]

    def remove(one: Reference) -> None:
        if one is reference:
            kit.ray.on_get = None
            collector._remove(next(w for w in collector.workers if w.actor is first), "of a test")

    kit.ray.on_get = remove
    first.finish("a")
    again = kit.having("a")
    assert again is not first
    assert not pending.is_done()
    again.finish("a")
    assert names(pending.result()) == ["a", "b"]
    assert collector.counts()["rollout/redone"] == 1.0


def test_only_a_worker_that_does_not_answer_is_replaced(kit: Kit) -> None:
    collector = kit.collector(parallel={"deadline": 0.3})
    kit.ready(2)
    pending = collector.submit(request("a", "b"))
    first, second = kit.having("a"), kit.having("b")
    first.is_frozen = True
    kit.until(lambda: any("has not answered for 0.3 s" in line for line in kit.notes))
    kit.until(lambda: first.is_dead)
    assert not second.is_dead
    kit.until(lambda: any("a" in a.attempts and not a.is_dead for a in kit.ray.actors))
    for actor in [a for a in kit.ray.actors if not a.is_dead]:
        actor.finish(*actor.attempts)
    assert names(pending.result()) == ["a", "b"]


def test_a_suspended_learner_does_not_remove_its_workers(kit: Kit) -> None:
    kit.collector(parallel={"deadline": 0.4})
    kit.ready(2)
    kit.ray.stalls = True
    kit.until(lambda: not kit.ray.stalls)
    time.sleep(0.2)
    assert not any("is lost" in line for line in kit.notes)


def test_weights_that_are_sent_while_a_worker_starts_are_loaded_before_its_first_task(
    kit: Kit,
) -> None:
    may_start = threading.Event()
    waits: list[Reference] = []
    collector = kit.collector(cluster={"address": "here", "workers": 1})
    kit.ready(1)
    collector.load({"w": torch.zeros(2)}, 1)
    old = kit.ray.actors[0]
    assert old.loaded == [1]
    plain = Actor.call

    def slow_start(actor: Actor, name: str, values: tuple[Any, ...]) -> Reference:
        if name == "start" and not may_start.is_set():
            waits.append(Reference())
            return waits[-1]
        return plain(actor, name, values)

    Actor.call = slow_start  # type: ignore[method-assign]
    try:
        old.die()
        kit.until(lambda: waits)
        collector.load({"w": torch.ones(2)}, 2)
        pending = collector.submit(request("a"))
        new = kit.ray.actors[1]
        assert not new.attempts
        may_start.set()
        waits[0].answer("")
        kit.having("a").finish("a")
    finally:
        Actor.call = plain  # type: ignore[method-assign]
    assert new.loaded == [2]
    assert names(pending.result()) == ["a"]


def test_a_worker_that_misses_a_broadcast_gets_the_weights_from_the_store(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(BroadcastGroup, "send", lambda group, weights: sent.append(weights))
    collector = kit.collector(cluster={"address": "here", "workers": 2, "sync": "broadcast"})
    kit.ready(2)
    first, second = kit.ray.actors
    kit.ray.answers["receive"] = lambda actor, *_: "no route to host" if actor is second else ""
    collector.load({"w": torch.zeros(2)}, 1)
    assert len(sent) == 1 and (first.loaded, second.loaded) == ([], [1])
    assert "the broadcast of version 1 failed; the weights are sent through the store" in kit.notes


def test_weights_that_no_worker_can_load_end_the_run(kit: Kit) -> None:
    collector = kit.collector()
    kit.ready(2)
    kit.ray.answers["load"] = lambda *_: "these weights are not the model's"
    with pytest.raises(RunStopped, match="cannot take the weights: these weights are not"):
        collector.load({"w": torch.zeros(2)}, 1)
    with pytest.raises(RunStopped, match="not the model's"):
        collector.submit(request("a"))


def test_workers_that_die_of_new_weights_end_the_run_and_not_in_a_loop(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_DELAY", 0.0)
    collector = kit.collector()
    kit.ready(2)
    pending = collector.submit(request("a", "b"))

    def die(actor: Actor, name: str, values: tuple[Any, ...]) -> Any:
        actor.die()
        return Died("The actor is dead because its worker process has died.")

    kit.ray.answers["load"] = die
    with suppress(RunStopped):  # the run may end before load returns
        collector.load({"w": torch.zeros(2)}, 1)
    with pytest.raises(RunStopped, match="died one after the other without a single episode"):
        pending.result()
    assert len(kit.ray.actors) <= 2 + module.MAX_FAILED_STARTS + 2 * 2


def test_a_task_that_ends_every_worker_is_named(kit: Kit) -> None:
    collector = kit.collector(cluster={"address": "here", "workers": 1})
    kit.ready(1)
    pending = collector.submit(request("fine", "deadly"))
    kit.having("fine", "deadly").finish("fine")
    for _ in range(module.MAX_DEATHS):
        actor = kit.having("deadly")
        collector._num_failed_starts = 0  # others work
        collector._start_after = 0.0
        actor.die()
        collector._start_after = 0.0
        kit.until(lambda actor=actor: not any(w.actor is actor for w in collector.workers))
        collector._start_after = 0.0
    with pytest.raises(RunStopped, match="5 workers died while task deadly was attempted"):
        pending.result()


def test_an_error_in_a_worker_is_raised_by_result_and_load(kit: Kit) -> None:
    collector = kit.collector()
    kit.ready(2)
    pending = collector.submit(request("a", "b"))
    kit.having("b").attempts["b"].answer(AttemptResult(None, error="the judge is out"))
    with pytest.raises(RunStopped, match=r"worker 1 \(pid 1\) failed at task b: the judge is out"):
        pending.result()
    with pytest.raises(RunStopped, match="the judge is out"):
        collector.load({"w": torch.zeros(2)}, 1)


def test_a_run_without_any_placed_worker_ends_with_what_each_needs(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PLACEMENT_TIMEOUT", 0.0)
    monkeypatch.setattr(Actor, "call", lambda *_: Reference())
    collector = kit.collector(parallel={"deadline": 0.1})
    with pytest.raises(
        RunStopped, match=r"could not place a worker .*cluster.cpus=1 .*free on all: 1 CPUs"
    ):
        collector.wait()


def test_the_number_changes_with_the_file_and_no_attempt_is_cut_short(kit: Kit) -> None:
    collector = kit.collector()
    kit.ready(2)
    pending = collector.submit(request("a", "b"))
    kit.having("a")
    second = kit.having("b")
    scale = kit.folder / SCALE
    write_text(scale, '{"workers": 1}')  # whole: half a file is other content
    kit.until(lambda: any("gets no more tasks: 1 workers are wanted" in line for line in kit.notes))
    later = collector.submit(request("c"))
    first = kit.having("a", "c")
    assert not second.is_dead
    second.finish("b")
    kit.until(lambda: second.is_dead)
    first.finish("a", "c")
    assert names(pending.result()) == ["a", "b"]
    assert names(later.result()) == ["c"]
    assert collector.counts()["rollout/redone"] == 0.0
    write_text(scale, "{nonsense")
    kit.until(lambda: any("does not hold a number of workers" in line for line in kit.notes))
    time.sleep(0.1)
    assert sum("does not hold a number of workers" in line for line in kit.notes) == 1
    write_text(scale, '{"workers": 3}')
    kit.ready(4)
    assert collector.counts()["rollout/workers"] == 3.0


def test_the_table_has_what_each_worker_does(kit: Kit) -> None:
    collector = kit.collector()
    kit.ready(2)
    collector.submit(request("a", "b", "c"))
    kit.having("a", "c")
    assert collector.table() == {
        "worker 0 (pid 0)": "has 2 episodes in progress",
        "worker 1 (pid 1)": "has 1 episode in progress",
    }


def test_learners_that_wait_for_long_episodes_get_signs_of_life_from_the_first() -> None:
    """Every quarter of the deadline: the episodes arrive after four of them, and no learner has failed."""
    flags: list[bool] = []

    class Others:
        deadline = 0.1
        is_first = True

        def any(self, flag: bool, what: str) -> bool:
            flags.append(flag)
            return flag

        def share(self, value: Any, what: str) -> Any:
            return value

    late = SimpleNamespace(is_done=lambda: time.monotonic() > began + 0.1, result=lambda: ["e"])
    began = time.monotonic()
    collector: Any = SimpleNamespace(submit=lambda request: late)
    others: Any = Others()
    assert SharedCollector(collector, others).submit(request("a")).result() == ["e"]
    assert flags[0] is True
    assert flags[-1] is False
    assert len(flags) >= 3


@pytest.mark.parametrize(
    ("needed", "machines", "is_enough"),
    [
        ({"workers": 3, "cpus": 1.0}, [{"CPU": 4.0}], True),
        ({"workers": 4, "cpus": 1.0}, [{"CPU": 4.0}], False),
        ({"workers": 1, "cpus": 3.0}, [{"CPU": 2.0}, {"CPU": 2.0}, {"CPU": 2.0}], False),
        ({"workers": 2, "cpus": 0.3}, [{"CPU": 0.9}], True),  # 0.9 // 0.3 is 2 in floating point
        ({"workers": 1, "cpus": 0.0, "gpus": 1.0}, [{"CPU": 8.0, "GPU": 1.0}, {"GPU": 1.0}], True),
        ({"workers": 2, "cpus": 0.0, "gpus": 1.0}, [{"CPU": 8.0, "GPU": 2.0}], False),
        ({"workers": 9, "cpus": 0.0}, [{"CPU": 1.0}], True),
    ],
)
def test_capacity_is_counted_machine_by_machine(
    needed: dict[str, Any], machines: list[dict[str, float]], is_enough: bool
) -> None:
    config = recipe(cluster={"address": "here", **needed})
    nodes = [{"Alive": True, "Resources": one} for one in machines]
    gone = [{"Alive": False, "Resources": {"CPU": 99.0, "GPU": 99.0}}]
    if is_enough:
        check_capacity(config, nodes + gone)
    else:
        with pytest.raises(RunStopped, match="reduce them, or add machines"):
            check_capacity(config, nodes + gone)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "The actor died because of an error raised in its creation task, ray::A()\n  File x\n"
            "ModuleNotFoundError: No module named 'graft'",
            "ModuleNotFoundError: No module named 'graft'",
        ),
        (
            "The actor died unexpectedly before finishing this task.\n\tpid: 3\nThe actor is dead "
            "because its worker process has died. Worker exit type: SYSTEM_ERROR",
            "its process was killed (SIGKILL or out of memory)",
        ),
        (
            "The actor died.\nThe actor died because its node has died. Node Id: 7",
            "its machine is gone",
        ),
        ("something new\nand more", "something new"),
    ],
)
def test_one_line_is_kept_of_rays_report_of_a_death(text: str, cause: str) -> None:
    assert cause_of(Died(text)) == cause


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r'pip install "graft-rl\[ray\]" on every machine'):
        ray_module()


class TestScale:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        (tmp_path / "config.yaml").write_text("run: {name: r}\ncluster: {address: local}\n")
        return tmp_path

    def invoke(self, *given: str) -> Any:
        import typer

        from graft.commands.scale import scale

        app = typer.Typer()
        app.command()(scale)
        return CliRunner().invoke(app, list(given))

    def test_it_writes_the_number_that_the_collector_reads(self, run: Path) -> None:
        done = self.invoke(str(run), "4", "--json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout.splitlines()[-1])["workers"] == 4
        assert json.loads((run / SCALE).read_text()) == {"workers": 4}
        assert [file.name for file in run.iterdir() if "part" in file.name] == []

    def test_it_reports_that_no_process_runs_the_folder(self, run: Path) -> None:
        done = self.invoke(str(run), "1")
        assert "will have 1 worker\n" in done.output
        assert "no process of this machine runs it now" in done.output

    def test_it_refuses_a_run_without_a_cluster(self, run: Path) -> None:
        (run / "config.yaml").write_text("run: {name: r}\ncluster: {address: ''}\n")
        done = self.invoke(str(run), "3")
        assert isinstance(done.exception, ConfigError) and not (run / SCALE).exists()
        assert "cluster.address=local" in str(done.exception)

    def test_it_refuses_what_is_no_run_and_no_number(self, run: Path, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        for given, message in (
            ((str(tmp_path / "empty"), "2"), "is no run"),
            ((str(tmp_path / "none"), "2"), "no run"),
            ((str(run), "0"), "at least one worker"),
        ):
            done = self.invoke(*given)
            assert isinstance(done.exception, ConfigError)
            assert message in str(done.exception)
        assert not (run / SCALE).exists()
        assert self.invoke(str(run), "many").exit_code == 2


def test_silence_counts_from_the_ping_or_the_last_answer() -> None:
    worker = ClusterWorker(0, None, None)
    assert worker.silence(100.0) == 0.0  # no ping was sent
    worker.pinged_at = 90.0
    assert worker.silence(100.0) == 10.0
    worker.answered_at = 97.0
    assert worker.silence(100.0) == 3.0
    worker.pinged_at = math.inf
    assert worker.silence(100.0) == 0.0
