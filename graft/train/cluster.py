"""Training on a cluster: Ray places learners and workers on machines, the loop stays what it is.

    this process          supervises: places the learners, shows what they say, begins again if one dies
    learners              one `train.run.Session` each, together as under torchrun; the first one writes
                          the run's folder and has the workers (`train.workers`)
    workers               an engine and its environments each (`train.rollout_worker`)

The run's folder must be where every machine that may learn sees it: a learner that begins again reads
its last checkpoint there.
"""

from __future__ import annotations

import os
import queue
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from graft.config import Config, ConfigError, check
from graft.rollout.crew import Crew, Job, Pending
from graft.train.folder import RunStopped
from graft.train.processes import Processes
from graft.train.rayed import ray_module
from graft.train.workers import Workers
from graft.types import Episode
from graft.waits import waiting

POLL = 0.5
"""Seconds between two looks at what a learner has said."""
TO_STOP = 120.0
"""Seconds that learners have to end their step and save it, when somebody wants to stop."""


class Led:
    """The crew of several learners: the first one has the workers, the others hear from it."""

    def __init__(self, workers: Crew | None, processes: Processes) -> None:
        self.workers, self.processes = workers, processes

    def submit(self, job: Job) -> Pending:
        own = None if self.workers is None else self.workers.submit(job)
        return _Heard(own, job.name, self.processes)

    def load(self, weights: Mapping[str, Any] | None, version: int) -> None:
        if self.workers is not None:
            self.workers.load(weights, version)
        elif weights is not None:
            for name in weights:  # they are brought together by everybody
                weights[name]
        self.processes.barrier(f"the workers to have version {version} of the weights")

    def counts(self) -> dict[str, float]:
        own = {} if self.workers is None else self.workers.counts()
        return self.processes.share(own, "counts of the rollouts")

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()


class _Heard:
    def __init__(self, own: Pending | None, name: str, processes: Processes) -> None:
        self.own, self.name, self.processes = own, name, processes

    def result(self) -> list[Episode]:
        return self.processes.share(None if self.own is None else self.own.result(), self.name)

    def is_done(self) -> bool:
        return self.own is not None and self.own.is_done()


class LearnerActor:
    """One learner, on whatever machine Ray has found for it."""

    def __init__(self, config: dict[str, Any], rank: int, world: int, cwd: str) -> None:
        self.rank, self.world, self.cwd = rank, world, cwd
        with suppress(OSError):
            os.chdir(cwd)
        self.config = check(config)
        self.said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.session: Any = None

    def address(self) -> tuple[str, int]:
        """Where the others may meet this one."""
        with socket.socket() as free:
            free.bind(("", 0))
            return ray_module().util.get_node_ip_address(), free.getsockname()[1]

    def who(self) -> str:
        return f"pid {os.getpid()} on {socket.gethostname()}"

    def lines(self) -> list[str]:
        """What there is to show since the last call."""
        found: list[str] = []
        while not self.said.empty():
            found.append(self.said.get())
        return found

    def stop(self) -> None:
        """End the step, save, and come back."""
        if self.session is not None:
            self.session.interrupt.ask()

    def train(self, host: str, port: int) -> dict[str, Any]:
        """{"summary": ...}, {"wrong": what a user can act on} or {"stopped": True}."""
        from graft.models.device import choose_device
        from graft.train.display import Display
        from graft.train.run import Session

        if self.world > 1:
            os.environ |= {
                "RANK": str(self.rank),
                "WORLD_SIZE": str(self.world),
                "LOCAL_RANK": "0",  # Ray shows each process its own device only
                "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
            }
        config = self.config
        device = choose_device(config.model.device)
        with Processes.start(config.parallel.deadline, device) as processes:
            stream: Any = _Lines(self.said)
            with Display(
                config.train.steps, quiet=not processes.is_first, stream=stream
            ) as display:
                session = Session(config, display, processes, self._crew, waits=True)
                self.session = session
                try:
                    return {"summary": session.train()}
                except KeyboardInterrupt:
                    return {"stopped": True}
                except (RunStopped, ConfigError, ValueError) as error:
                    return {"wrong": str(error)}

    def _crew(self, parts: Any) -> Crew:
        workers = None
        if parts.processes.is_first:
            folder = Path(self.config.run.dir) / self.config.run.name
            workers = Workers(self.config, folder, self.said.put, self.cwd)
        return workers if workers and self.world == 1 else Led(workers, parts.processes)


class _Lines:
    """A stream that keeps whole lines for somebody who asks."""

    encoding = "utf-8"

    def __init__(self, said: queue.SimpleQueue[str]) -> None:
        self.said, self.begun = said, ""

    def write(self, text: str) -> int:
        *whole, self.begun = (self.begun + text).split("\n")
        for line in whole:
            self.said.put(line)
        return len(text)

    def flush(self) -> None:
        """Lines are passed on as they end."""

    def isatty(self) -> bool:
        return False


def train_on_cluster(config: Config, say: Callable[[str], None]) -> dict[str, Any]:
    """Run a recipe on a Ray cluster to its end; returns its summary."""
    ray = ray_module()
    ran_before = ray.is_initialized()
    if not ran_before:
        address = None if config.cluster.address == "local" else config.cluster.address
        with waiting(f"the Ray cluster at {config.cluster.address}", 120.0):
            try:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise RunStopped(
                    f"no Ray cluster at cluster.address={config.cluster.address}: {error}. Start one "
                    "(ray start --head), or use cluster.address=local"
                ) from None
    run = config.run.model_copy(update={"dir": str(Path(config.run.dir).absolute())})
    config = config.model_copy(update={"run": run})
    try:
        return _supervise(config, ray, say)
    finally:
        if not ran_before:
            ray.shutdown()


def _supervise(config: Config, ray: Any, say: Callable[[str], None]) -> dict[str, Any]:
    """Learners until they are done; from the last checkpoint if one of them dies."""
    _check_resources(config, ray)
    for attempt in range(config.cluster.restarts + 1):
        learners = _place(config, ray)
        try:
            found = _watch(learners, ray, say)
        except ray.exceptions.RayError as error:
            cause = str(error).strip().partition("\n")[0]
            left = config.cluster.restarts - attempt
            if not left:
                raise RunStopped(
                    f"a learner died {attempt + 1} times, the last time: {cause}. The last checkpoint is "
                    "intact: the same command goes on from there"
                ) from None
            say(f"a learner died ({cause}); the run goes on from its last checkpoint")
            continue
        finally:
            for learner in learners:
                ray.kill(learner)
        if "wrong" in found:
            raise RunStopped(found["wrong"])
        if "stopped" in found:
            say("stopped; what was learned is saved, and the same command goes on from there")
            raise KeyboardInterrupt
        return found["summary"]
    raise AssertionError("unreachable")


def _check_resources(config: Config, ray: Any) -> None:
    """More than the cluster has would wait for ever."""
    cluster, there = config.cluster, ray.cluster_resources()
    many = cluster.learners + cluster.workers
    for name, each in (("CPU", cluster.cpus), ("GPU", cluster.gpus)):
        if many * each > there.get(name, 0.0):
            raise RunStopped(
                f"cluster.learners + cluster.workers = {many} processes ask for {many * each:g} {name}s "
                f"(cluster.{name.lower()}s={each:g} each) and the cluster has {there.get(name, 0.0):g}; "
                "ask for less, or add machines"
            )


def _place(config: Config, ray: Any) -> list[Any]:
    cluster, values = config.cluster, config.model_dump(mode="json")
    actor = ray.remote(LearnerActor).options(
        num_cpus=cluster.cpus, num_gpus=cluster.gpus, max_restarts=0, max_concurrency=4
    )
    cwd = str(Path.cwd())
    return [actor.remote(values, rank, cluster.learners, cwd) for rank in range(cluster.learners)]


def _watch(learners: list[Any], ray: Any, say: Callable[[str], None]) -> dict[str, Any]:
    """What they end with; what the first one says is shown meanwhile."""
    first = learners[0]
    with waiting("Ray to start the learners", 300.0):
        host, port = ray.get(first.address.remote(), timeout=300.0)
        say(f"learner: {ray.get(first.who.remote(), timeout=300.0)}")
    running = [learner.train.remote(host, port) for learner in learners]
    try:
        return _until_done(running, first, ray, say)
    except KeyboardInterrupt:
        say("stopping: the step under way is finished and saved (once more to give it up)")
        for learner in learners:
            learner.stop.remote()
        return _until_done(running, first, ray, say, time.monotonic() + TO_STOP)


def _until_done(
    running: list[Any],
    first: Any,
    ray: Any,
    say: Callable[[str], None],
    end: float = float("inf"),
) -> dict[str, Any]:
    left = list(running)
    while left and time.monotonic() < end:
        done, left = ray.wait(left, num_returns=1, timeout=POLL)
        for line in ray.get(first.lines.remote(), timeout=60.0):
            say(line)
        for reference in done:
            found = ray.get(reference)  # raises if its process died
            if "wrong" in found:
                return found
    if left:
        return {"stopped": True}
    return ray.get(running[0])
