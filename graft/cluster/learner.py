"""A learner on a cluster: a Ray actor that runs one `train.session.Session`."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.actions.fields import ActionsError
from graft.cluster.collector import RayCollector
from graft.cluster.display_relay import DisplayCall, DisplayRelay
from graft.cluster.ray_import import ray_module, store_host
from graft.cluster.scale_file import SCALE
from graft.cluster.shared_collector import SharedCollector
from graft.config import ConfigError, unpacked
from graft.deadlines import Watchdog
from graft.files import remove
from graft.models.device_choice import choose_device
from graft.registry import UnknownName
from graft.rollout.collector import Collector
from graft.serving.listening import listening
from graft.train.distributed.failures import describe
from graft.train.distributed.heartbeat import ProcessesLost
from graft.train.distributed.process_group import ProcessGroup
from graft.train.monitor.display import Display
from graft.train.run_dir.folder import RunFolder, RunStopped
from graft.trust.restricted_pickle import SECRET
from graft.types import Episode

RELEASE_TIMEOUT = 10.0
"""Seconds for a learner that died to release the run's folder."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The output of a finished run."""

    summary: dict[str, Any]
    episodes: list[Episode]
    """Some held-out episodes."""
    folder: RunFolder


@dataclass(frozen=True, slots=True)
class LearnerOutcome:
    """How a learner ended; one of the fields is set."""

    finished: Finished | None = None
    stopped: str = ""
    """The note about an interruption."""
    error: Exception | None = None
    """An error that a restart would repeat."""
    lost: str = ""
    """Why its process, or its connection to the other learners, is gone."""


class LearnerActor:
    """One learner, on the machine that Ray chose."""

    def __init__(
        self, config: dict[str, Any], rank: int, world: int, cwd: str, attempt: int, secret: str
    ) -> None:
        os.environ[SECRET] = secret  # of the messages between the learners
        self.rank, self.world, self.cwd, self.attempt = rank, world, cwd, attempt
        with suppress(OSError):
            os.chdir(cwd)
        self.config = unpacked(config)
        self.relay = DisplayRelay()
        self.session: Any = None
        self.workers: RayCollector | None = None
        self.is_training = self.is_stop_requested = False

    def address(self) -> tuple[str, int]:
        """The address at which the other learners connect to this one."""
        host = store_host(ray_module())
        with listening(host, 0) as free:
            return host, free.getsockname()[1]

    def display_calls(self) -> list[DisplayCall]:
        """Output since the last call."""
        return self.relay.drain()

    def stop(self) -> bool:
        """Finish the step, save, and return; whether a step is to be saved."""
        self.is_stop_requested = True
        if self.session is not None:
            self.session.interrupt.ask()
        return self.is_training

    def train(self, host: str, port: int) -> LearnerOutcome:
        try:
            with ExitStack() as stack:
                return self._train(self._join(host, port, stack))
        except ProcessesLost as error:
            return LearnerOutcome(lost=str(error))
        except Exception as error:
            is_usage = isinstance(error, ConfigError | UnknownName | ActionsError)
            kind = ConfigError if is_usage or type(error) is ValueError else RunStopped
            return LearnerOutcome(error=kind(describe(error)))

    def _join(self, host: str, port: int, stack: ExitStack) -> ProcessGroup:
        """The process group of all learners; a single learner reports its workers during long waits."""
        device, deadline = choose_device(self.config.model.device), self.config.parallel.deadline
        if self.world > 1:
            os.environ |= {
                "RANK": str(self.rank),
                "WORLD_SIZE": str(self.world),
                "LOCAL_RANK": "0",  # Ray shows each process its own device only
                "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
            }
            return stack.enter_context(ProcessGroup.start(deadline, device, self.relay.note))
        watchdog = Watchdog(
            self.relay.note,
            after=min(30.0, max(5.0, deadline / 4)),
            name="the learner",
            peers=lambda: self.workers.table() if self.workers else {},
        )
        stack.enter_context(watchdog)
        return stack.enter_context(ProcessGroup(deadline, device))

    def _train(self, processes: ProcessGroup) -> LearnerOutcome:
        from graft.train.session import Session

        folder = RunFolder(self.config)
        display: Any = self.relay
        if processes.is_first:
            self._take_over(folder)
        else:
            display = Display(self.config.train.steps, quiet=True)
        session = Session(self.config, display, processes, self._make_collector, waits=True)
        self.session = session
        if self.is_stop_requested:
            session.interrupt.ask()
        try:
            summary = session.train()
        except KeyboardInterrupt:
            return LearnerOutcome(stopped=folder.interruption_note())
        return LearnerOutcome(
            finished=Finished(summary, session.episodes[:3], RunFolder(self.config))
        )

    def _take_over(self, folder: RunFolder) -> None:
        """A number of workers set by `graft scale` holds for one command; a restarted learner waits
        until the one that died has released the folder."""
        if not self.attempt:
            remove(folder.path / SCALE)
            return
        end = time.monotonic() + RELEASE_TIMEOUT
        while time.monotonic() < end:
            try:
                folder.claim()
                return
            except RunStopped:
                time.sleep(0.5)
            finally:
                folder.release()

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
        self.is_training = True
        if self.workers and self.world == 1:
            return self.workers
        return SharedCollector(self.workers, components.processes)
