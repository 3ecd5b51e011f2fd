"""Training on a cluster: Ray places learners and workers on machines; the loop is the same.

    this process          supervises: places the learners, shows their output, restarts them if one dies
    learners              one `train.session.Session` each, together as under torchrun; the first one writes
                          the run's folder and has the workers (`cluster.collector`)
    workers               an engine and its environments each (`cluster.rollout_worker`)

The run's folder must be visible to every machine that may run a learner: a restarted learner reads its
last checkpoint there.
"""

from __future__ import annotations

import math
import os
import queue
import socket
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.actions.fields import ActionsError
from graft.cluster.collector import SCALE, RayCollector
from graft.cluster.ray_import import cause_of, ray_module
from graft.config import Config, ConfigError, check
from graft.deadlines import Watchdog, waiting
from graft.registry import UnknownName
from graft.rollout.collectors.collector import Collector, PendingRollouts
from graft.rollout.collectors.request import RolloutRequest
from graft.train.distributed.failures import describe
from graft.train.distributed.heartbeat import ProcessesLost
from graft.train.distributed.process_group import ProcessGroup
from graft.train.monitor.display import Display
from graft.train.run_dir.folder import RunFolder, RunStopped
from graft.train.run_dir.interrupt import Interrupt
from graft.types import Episode

POLL = 0.5
"""Seconds between two polls of a learner's output."""
SILENCE = 60.0
"""Seconds without an answer after which a learner counts as dead."""
TO_PLACE = 300.0
"""Seconds for Ray to place and start the learners."""
TO_STOP = 120.0
"""Seconds for learners to finish and save their step after an interrupt."""
GRACE = 10.0
"""Seconds for the other learners to report a cause when one has lost its connections, and for an ended
process to release the run's folder."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The output of a finished run."""

    summary: dict[str, Any]
    episodes: list[Episode]
    """Some held-out episodes."""
    folder: RunFolder


class LearnerResult:
    """The collector of several learners: the first one has the workers and forwards their episodes."""

    def __init__(self, workers: Collector | None, processes: ProcessGroup) -> None:
        self.workers, self.processes = workers, processes

    def submit(self, request: RolloutRequest) -> PendingRollouts:
        own = None if self.workers is None else self.workers.submit(request)
        return _ForwardedRollouts(own, request.name, self.processes)

    def load(self, weights: Mapping[str, Any] | None, version: int) -> None:
        if self.workers is not None:
            self.workers.load(weights, version)
        elif weights is not None:
            for name in weights:  # all processes gather them together
                weights[name]
        self.processes.barrier(f"the workers to have version {version} of the weights")

    def counts(self) -> dict[str, float]:
        own = {} if self.workers is None else self.workers.counts()
        return self.processes.share(own, "counts of the rollouts")

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()


class _ForwardedRollouts:
    def __init__(self, own: PendingRollouts | None, name: str, processes: ProcessGroup) -> None:
        self.own, self.name, self.processes = own, name, processes

    def result(self) -> list[Episode]:
        # episodes may take longer than the deadline between processes: send regular signs of life
        while self.processes.any(self._takes_longer(), f"{self.name}, or that they take longer"):
            pass
        return self.processes.share(None if self.own is None else self.own.result(), self.name)

    def _takes_longer(self) -> bool:
        if self.own is None:
            return False
        end = time.monotonic() + self.processes.deadline / 4
        while not self.own.is_done() and time.monotonic() < end:
            time.sleep(0.01)
        return not self.own.is_done()

    def is_done(self) -> bool:
        return self.own is not None and self.own.is_done()


class Relay:
    """Proxy of a display in another process: keeps calls until they are fetched."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()

    def note(self, text: str) -> None:
        self._told.put(("note", (text,)))

    def phase(self, name: str, steps: int) -> None:
        self._told.put(("phase", (name, steps)))

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        self._told.put(("update", (step, dict(metrics))))

    def alarm(self, text: str, level: str = "alarm", step: int | None = None) -> None:
        self._told.put(("alarm", (text, level, step)))

    def told(self) -> list[tuple[str, tuple[Any, ...]]]:
        """Calls since the last time."""
        found: list[tuple[str, tuple[Any, ...]]] = []
        while not self._told.empty():
            found.append(self._told.get())
        return found


class LearnerActor:
    """One learner, on the machine that Ray chose."""

    def __init__(
        self, config: dict[str, Any], rank: int, world: int, cwd: str, attempt: int
    ) -> None:
        self.rank, self.world, self.cwd, self.attempt = rank, world, cwd, attempt
        with suppress(OSError):
            os.chdir(cwd)
        self.config = check(config)
        self.relay = Relay()
        self.session: Any = None
        self.workers: RayCollector | None = None
        self.is_under_way = self.shall_stop = False

    def address(self) -> tuple[str, int]:
        """The address at which the others connect to this one."""
        with socket.socket() as free:
            free.bind(("", 0))
            return ray_module().util.get_node_ip_address(), free.getsockname()[1]

    def told(self) -> list[tuple[str, tuple[Any, ...]]]:
        """Output since the last call."""
        return self.relay.told()

    def stop(self) -> bool:
        """Finish the step, save, and return; whether there is anything to wait for."""
        self.shall_stop = True
        if self.session is not None:
            self.session.interrupt.ask()
        return self.is_under_way

    def train(self, host: str, port: int) -> dict[str, Any]:
        """How it ended: {"finished": ...}, {"stopped": whether something is saved}, {"wrong": an error that
        a user can act on, "is_usage": ...} or {"lost": why the learners lost each other}."""
        from graft.models.device import choose_device

        if self.world > 1:
            os.environ |= {
                "RANK": str(self.rank),
                "WORLD_SIZE": str(self.world),
                "LOCAL_RANK": "0",  # Ray shows each process its own device only
                "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
            }
        config = self.config
        try:
            device = choose_device(config.model.device)
            with (
                ProcessGroup.start(config.parallel.deadline, device, self.relay.note) as processes,
                self._watchdog(),
            ):
                return self._train(processes)
        except ProcessesLost as error:
            return {"lost": str(error)}
        except Exception as error:
            usage = isinstance(error, ConfigError | UnknownName | ActionsError)
            return {
                "wrong": describe(error),
                "is_usage": usage or type(error) is ValueError,
            }

    def _train(self, processes: ProcessGroup) -> dict[str, Any]:
        from graft.train.session import Session

        folder = RunFolder(self.config)
        if processes.is_first:
            self._take_over(folder)
        display: Any = self.relay
        if not processes.is_first:
            display = Display(self.config.train.steps, quiet=True)
        session = Session(self.config, display, processes, self._make_collector, waits=True)
        self.session = session
        if self.shall_stop:
            session.interrupt.ask()
        try:
            summary = session.train()
        except KeyboardInterrupt:
            return {"stopped": any(folder.checkpoints.glob("*/state.json"))}
        return {"finished": (summary, session.episodes[:3])}

    def _take_over(self, folder: RunFolder) -> None:
        """The number of workers set by `graft scale` holds for this command; and a learner that died may
        take some seconds to release the folder."""
        if not self.attempt:
            (folder.path / SCALE).unlink(missing_ok=True)
            return
        end = time.monotonic() + GRACE
        while time.monotonic() < end:
            try:
                folder.claim()
            except RunStopped:
                time.sleep(POLL)
            else:
                break
            finally:
                folder.release()

    def _watchdog(self) -> AbstractContextManager[Any]:
        """Several learners already share a process group."""
        if self.world > 1:
            return nullcontext()
        patience = min(30.0, max(5.0, self.config.parallel.deadline / 4))
        return Watchdog(
            self.relay.note,
            after=patience,
            every=patience,
            name="the learner",
            peers=lambda: self.workers.table() if self.workers else {},
        )

    def _make_collector(self, components: Any) -> Collector:
        if components.processes.is_first:
            folder = Path(self.config.run.dir) / self.config.run.name
            self.workers = RayCollector(components.config, folder, self.relay.note, self.cwd)
            try:
                self.workers.wait()
            except BaseException:
                self.workers.close()
                raise
        components.processes.barrier("the first worker to be ready")
        self.is_under_way = True
        if self.workers and self.world == 1:
            return self.workers
        return LearnerResult(self.workers, components.processes)


def train_on_cluster(config: Config, display: Display) -> Finished:
    """Run a recipe on a Ray cluster to its end."""
    if config.engine.url:
        raise ConfigError(
            f"cluster.address={config.cluster.address} places engines on machines, and engine.url="
            f"{config.engine.url} names running servers; leave out one of the two"
        )
    ray = ray_module()
    ran_before = ray.is_initialized()
    run = config.run.model_copy(update={"dir": str(Path(config.run.dir).absolute())})
    config = config.model_copy(update={"run": run})
    try:
        with Watchdog(display.note):
            if not ran_before:
                _connect(config, ray)
            with Interrupt():  # after Ray, which has a handler of its own for SIGTERM
                return _supervise(config, ray, display)
    finally:
        if not ran_before:
            ray.shutdown()


def _connect(config: Config, ray: Any) -> None:
    address = config.cluster.address
    own = {"include_dashboard": False} if address == "local" else {}
    with waiting(f"the Ray cluster at {address}", 120.0):
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **own)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise RunStopped(
                f"no Ray cluster at cluster.address={address}: {error}. Start one (ray start --head), "
                "or use cluster.address=local"
            ) from None


def _supervise(config: Config, ray: Any, display: Display) -> Finished:
    """Run learners until they are done; restart from the last checkpoint if one dies."""
    refuse_what_has_no_room(config, ray.nodes())
    restarts = config.cluster.restarts
    for attempt in range(restarts + 1):
        learners = _place(config, ray, attempt)
        try:
            found = _watch(learners, ray, display)
        finally:
            for learner in learners:
                ray.kill(learner)
        if "wrong" in found:
            raise ConfigError(found["wrong"]) if found["is_usage"] else RunStopped(found["wrong"])
        if "stopped" in found:
            _tell_of_stop(found["stopped"], config, display)
            raise KeyboardInterrupt
        if "finished" in found:
            summary, episodes = found["finished"]
            return Finished(summary, episodes, RunFolder(config))
        if attempt == restarts:
            times = "once" if not attempt else f"{attempt + 1} times"
            raise RunStopped(
                f"a learner died {times} (cluster.restarts={restarts}), the last time: {found['lost']}. The "
                "last checkpoint is intact: the same command resumes from there"
            )
        display.note(f"a learner died: {found['lost']}; the run resumes from its last checkpoint")
    raise AssertionError("unreachable")


def _tell_of_stop(is_saved: bool | None, config: Config, display: Display) -> None:
    """`is_saved` as the learners report it; None if they did not."""
    folder = RunFolder(config)
    if is_saved is None:
        is_saved = any(folder.checkpoints.glob("*/state.json"))
    if is_saved:
        saved = f"the progress is saved in {folder.path}"
        display.note(f"interrupted; {saved}, and the same command resumes from there")
    else:
        display.note("interrupted before the first checkpoint; nothing was saved")


def refuse_what_has_no_room(config: Config, nodes: list[dict[str, Any]]) -> None:
    """Refuse more than the cluster has, which would wait for ever. A process runs on one machine: two
    machines of 2 CPUs cannot take one that needs 3."""
    cluster = config.cluster
    asked = {"CPU": cluster.cpus, "GPU": cluster.gpus}
    machines = [node["Resources"] for node in nodes if node["Alive"]]
    room = sum(
        min((_times(machine.get(name, 0.0), each) for name, each in asked.items()), default=0)
        for machine in machines
    )
    many = cluster.learners + cluster.workers
    if many > room:
        listed = "; ".join(
            f"{machine.get('CPU', 0.0):g} CPUs, {machine.get('GPU', 0.0):g} GPUs"
            for machine in machines[:8]
        )
        raise RunStopped(
            f"cluster.learners + cluster.workers = {many} processes ask for cluster.cpus="
            f"{cluster.cpus:g} and cluster.gpus={cluster.gpus:g} each, and the cluster can place "
            f"{room:g} of them (its machines: {listed or 'none'}); ask for less, or add machines"
        )


def _times(there: float, each: float) -> float:
    """How often it fits, without rounding errors: 0.3 three times into 0.9."""
    return math.floor(there / each + 1e-6) if each else math.inf


def _place(config: Config, ray: Any, attempt: int) -> list[Any]:
    cluster, values = config.cluster, config.model_dump(mode="json")
    actor = ray.remote(LearnerActor).options(
        num_cpus=cluster.cpus, num_gpus=cluster.gpus, max_restarts=0, max_concurrency=4
    )
    world, cwd = cluster.learners, str(Path.cwd())
    return [actor.remote(values, rank, world, cwd, attempt) for rank in range(world)]


def _watch(learners: list[Any], ray: Any, display: Display) -> dict[str, Any]:
    """How the learners ended; their output is shown meanwhile."""
    try:
        with waiting("Ray to place and start the learners", TO_PLACE):
            host, port = ray.get(learners[0].address.remote(), timeout=TO_PLACE)
    except ray.exceptions.GetTimeoutError:
        free = ray.available_resources()
        return _wrong(
            f"Ray has not started the learners in {TO_PLACE:g} s; free in the cluster: "
            f"{free.get('CPU', 0.0):g} CPUs, {free.get('GPU', 0.0):g} GPUs; see `ray status`"
        )
    except ray.exceptions.RayError as error:
        return _died(error)
    running = {learner.train.remote(host, port): learner for learner in learners}
    try:
        return _until_done(running, ray, display)
    except KeyboardInterrupt:
        asked = [learner.stop.remote() for learner in learners]
        try:
            is_under_way = any(ray.get(asked, timeout=SILENCE))
        except ray.exceptions.RayError:
            is_under_way = False
        if not is_under_way:  # nothing to save
            return {"stopped": None}
        display.note(
            "stopping: the current step is finished and saved (press Ctrl-C again to abandon it)"
        )
        return _until_done(running, ray, display, time.monotonic() + TO_STOP)


def _until_done(
    running: dict[Any, Any], ray: Any, display: Display, end: float = math.inf
) -> dict[str, Any]:
    """The result of the first learner if all end well; else the first cause."""
    left, ended = list(running), dict[Any, dict[str, Any]]()
    lost: dict[str, Any] | None = None
    while left and time.monotonic() < end:
        done, left = ray.wait(left, num_returns=1, timeout=POLL)
        for learner in running.values():
            if (found := _show(learner, ray, display)) is not None:
                return found
        for reference in done:
            try:
                found = ended[reference] = ray.get(reference)
            except ray.exceptions.RayError as error:
                return _died(error)
            if "wrong" in found:
                return found
            if (
                "lost" in found and lost is None
            ):  # another learner has the cause, or is the lost one
                lost, end = found, min(end, time.monotonic() + GRACE)
    if lost is not None:
        return lost
    return {"stopped": None} if left else ended[next(iter(running))]


def _show(learner: Any, ray: Any, display: Display) -> dict[str, Any] | None:
    """Its new output; how it ended, if it does not answer."""
    try:
        told = ray.get(learner.told.remote(), timeout=SILENCE)
    except ray.exceptions.GetTimeoutError:
        return {"lost": f"it has not answered for {SILENCE:g} s"}
    except ray.exceptions.RayError as error:
        return _died(error)
    for name, values in told:
        getattr(display, name)(*values)
    return None


def _died(error: Exception) -> dict[str, Any]:
    """A learner that cannot be created would fail again."""
    if "in its creation task" in str(error):
        return _wrong(
            f"a learner cannot start: {cause_of(error)}. graft must be installed on every machine of "
            "the cluster, in the same version"
        )
    return {"lost": cause_of(error)}


def _wrong(text: str) -> dict[str, Any]:
    return {"wrong": text, "is_usage": False}
