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
import secrets
import time
from pathlib import Path
from typing import Any

from graft.cluster.learner import Finished, LearnerActor, LearnerOutcome
from graft.cluster.ray_import import cause_of, ray_module
from graft.config import Config, ConfigError
from graft.deadlines import Watchdog, waiting
from graft.train.monitor.display import Display
from graft.train.run_dir.folder import RunFolder, RunStopped
from graft.train.run_dir.interrupt import Interrupt

POLL = 0.5
"""Seconds between two polls of a learner's output."""
ANSWER_TIMEOUT = 60.0
"""Seconds without an answer after which a learner counts as dead."""
PLACEMENT_TIMEOUT = 300.0
"""Seconds for Ray to place and start the learners."""
STOP_TIMEOUT = 120.0
"""Seconds for learners to finish and save their step after an interrupt."""
CAUSE_TIMEOUT = 10.0
"""Seconds for the other learners to report a cause when one has lost its connections."""


def train_on_cluster(config: Config, display: Display) -> Finished:
    """Run a recipe on a Ray cluster to its end."""
    if config.engine.url:
        raise ConfigError(
            f"cluster.address={config.cluster.address} places engines on machines, and engine.url="
            f"{config.engine.url} names running servers; leave out one of the two"
        )
    ray = ray_module(config.cluster.address)
    ran_before = ray.is_initialized()
    config = config.changed({"run.dir": str(Path(config.run.dir).absolute())})
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
    check_capacity(config, ray.nodes())
    restarts = config.cluster.restarts
    for attempt in range(restarts + 1):
        learners = _place(config, ray, attempt)
        try:
            outcome = _run_learners(learners, ray, display)
        finally:
            for learner in learners:
                ray.kill(learner)
        if outcome.error is not None:
            raise outcome.error
        if outcome.finished is not None:
            return outcome.finished
        if not outcome.lost:
            display.note(outcome.stopped or RunFolder(config).interruption_note())
            raise KeyboardInterrupt
        if attempt == restarts:
            times = "once" if not attempt else f"{attempt + 1} times"
            raise RunStopped(
                f"a learner died {times} (cluster.restarts={restarts}), the last time: {outcome.lost}. "
                "The last checkpoint is intact: the same command resumes from there"
            )
        display.note(f"a learner died: {outcome.lost}; the run resumes from its last checkpoint")
    raise AssertionError("unreachable")


def check_capacity(config: Config, nodes: list[dict[str, Any]]) -> None:
    """Refuse more than the cluster has, which would wait for ever. A process runs on one machine: two
    machines of 2 CPUs cannot take one that needs 3."""
    cluster = config.cluster
    machines = [node["Resources"] for node in nodes if node["Alive"]]
    capacity = sum(
        min(
            _num_fits(machine.get("CPU", 0.0), cluster.cpus),
            _num_fits(machine.get("GPU", 0.0), cluster.gpus),
        )
        for machine in machines
    )
    needed = cluster.learners + cluster.workers
    if needed > capacity:
        listed = "; ".join(
            f"{machine.get('CPU', 0.0):g} CPUs, {machine.get('GPU', 0.0):g} GPUs"
            for machine in machines[:8]
        )
        raise RunStopped(
            f"cluster.learners + cluster.workers = {needed} processes need cluster.cpus="
            f"{cluster.cpus:g} and cluster.gpus={cluster.gpus:g} each, and the cluster can place "
            f"{capacity:g} of them (its machines: {listed or 'none'}); reduce them, or add machines"
        )


def _num_fits(there: float, each: float) -> float:
    """How often it fits, without rounding errors: 0.3 three times into 0.9."""
    return math.floor(there / each + 1e-6) if each else math.inf


def _place(config: Config, ray: Any, attempt: int) -> list[Any]:
    cluster, values = config.cluster, config.packed()
    actor = ray.remote(LearnerActor).options(
        num_cpus=cluster.cpus, num_gpus=cluster.gpus, max_restarts=0, max_concurrency=4
    )
    world, cwd = cluster.learners, str(Path.cwd())
    secret = secrets.token_hex(32)
    return [actor.remote(values, rank, world, cwd, attempt, secret) for rank in range(world)]


def _run_learners(learners: list[Any], ray: Any, display: Display) -> LearnerOutcome:
    """How the learners ended; their output is shown meanwhile."""
    try:
        with waiting("Ray to place and start the learners", PLACEMENT_TIMEOUT):
            host, port = ray.get(learners[0].address.remote(), timeout=PLACEMENT_TIMEOUT)
    except ray.exceptions.GetTimeoutError:
        free = ray.available_resources()
        text = (
            f"Ray has not started the learners in {PLACEMENT_TIMEOUT:g} s; free in the cluster: "
            f"{free.get('CPU', 0.0):g} CPUs, {free.get('GPU', 0.0):g} GPUs; see `ray status`"
        )
        return LearnerOutcome(error=RunStopped(text))
    except ray.exceptions.RayError as error:
        return _outcome_of_death(error)
    running = {learner.train.remote(host, port): learner for learner in learners}
    try:
        return _wait_for_learners(running, ray, display)
    except KeyboardInterrupt:
        stops = [learner.stop.remote() for learner in learners]
        try:
            is_training = any(ray.get(stops, timeout=ANSWER_TIMEOUT))
        except ray.exceptions.RayError:
            is_training = False
        if not is_training:  # nothing to save
            return LearnerOutcome()
        display.note(
            "stopping: the current step is finished and saved (press Ctrl-C again to abandon it)"
        )
        return _wait_for_learners(running, ray, display, time.monotonic() + STOP_TIMEOUT)


def _wait_for_learners(
    running: dict[Any, Any], ray: Any, display: Display, end: float = math.inf
) -> LearnerOutcome:
    """The outcome of the first learner if all end well; else the first cause."""
    left, outcomes = list(running), dict[Any, LearnerOutcome]()
    lost: LearnerOutcome | None = None
    while left and time.monotonic() < end:
        done, left = ray.wait(left, num_returns=1, timeout=POLL)
        for learner in running.values():
            if (outcome := _show_output(learner, ray, display)) is not None:
                return outcome
        for reference in done:
            try:
                outcome = outcomes[reference] = ray.get(reference)
            except ray.exceptions.RayError as error:
                return _outcome_of_death(error)
            if outcome.error is not None:
                return outcome
            if outcome.lost and lost is None:  # another learner has the cause, or is the lost one
                lost, end = outcome, min(end, time.monotonic() + CAUSE_TIMEOUT)
    if lost is not None:
        return lost
    return LearnerOutcome() if left else outcomes[next(iter(running))]


def _show_output(learner: Any, ray: Any, display: Display) -> LearnerOutcome | None:
    """Show its new output; returns how it ended, if it does not answer."""
    try:
        calls = ray.get(learner.display_calls.remote(), timeout=ANSWER_TIMEOUT)
    except ray.exceptions.GetTimeoutError:
        return LearnerOutcome(lost=f"it has not answered for {ANSWER_TIMEOUT:g} s")
    except ray.exceptions.RayError as error:
        return _outcome_of_death(error)
    for name, values in calls:
        getattr(display, name)(*values)
    return None


def _outcome_of_death(error: Exception) -> LearnerOutcome:
    """A learner that cannot be created would fail again."""
    if "in its creation task" not in str(error):
        return LearnerOutcome(lost=cause_of(error))
    text = (
        f"a learner cannot start: {cause_of(error)}. graft must be installed on every machine of "
        "the cluster, in the same version"
    )
    return LearnerOutcome(error=RunStopped(text))
