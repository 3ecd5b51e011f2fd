"""What the phases of a run share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graft.config import Config
from graft.rollout.collector import Collector
from graft.train.components import RunComponents
from graft.train.distributed.process_group import ProcessGroup
from graft.train.learner import Learner
from graft.train.monitor.display import Display
from graft.train.run_dir.checkpoint import checkpoints
from graft.train.run_dir.checkpoint_writer import CheckpointWriter
from graft.train.run_dir.folder import RunFolder
from graft.train.run_dir.interrupt import Interrupt
from graft.train.run_dir.journal import Journal
from graft.types import Episode


@dataclass(slots=True)
class RunContext:
    """The objects and the state of a run, from its first phase to its last."""

    config: Config
    display: Display
    processes: ProcessGroup
    folder: RunFolder
    interrupt: Interrupt
    journal: Journal
    components: RunComponents
    collector: Collector
    writer: CheckpointWriter
    started: float
    state: dict[str, Any] = field(default_factory=lambda: {"seconds": {}})
    """Carried from checkpoint to checkpoint: scores before training, seconds per phase, cursor."""
    episodes: list[Episode] = field(default_factory=list[Episode])
    """Of the latest held-out evaluation."""

    def publish(self, version: int) -> None:
        """Give the learner's weights to the engines that sample."""
        self.collector.load(self.components.weights_to_publish(), version)

    def save(
        self,
        phase: str,
        step: int,
        learner: Learner,
        ahead: Mapping[int, list[Episode]] | None = None,
    ) -> None:
        """A checkpoint, unless there is one of this step; `ahead` are the episodes of later steps."""
        if any(c.phase == phase and c.step == step for c in checkpoints(self.folder.checkpoints)):
            return
        self.state["alarms"] = self.journal.alarms.to_json()
        self.journal.sync()  # a checkpoint without the records of its steps would lose them
        self.writer.save(phase, step, learner, self.state, ahead or {})

    def is_save_due(self, step: int) -> bool:
        every = self.config.run.save_every
        return every > 0 and step % every == 0

    def stop_together(self) -> None:
        """Processes that work together end at the same step."""
        if self.interrupt.waits and self.processes.any(
            self.interrupt.is_pending, "whether a process was interrupted"
        ):
            raise KeyboardInterrupt

    def show_notes(self) -> None:
        """The components' notes, each once."""
        for note in self.components.notes:
            self.display.note(note)
        self.components.notes.clear()

    def clock(self, phase: str) -> Callable[[], None]:
        """A function that adds the seconds since its last call to the phase's account."""
        last = time.perf_counter()

        def tick() -> None:
            nonlocal last
            now = time.perf_counter()
            seconds: dict[str, float] = self.state.setdefault("seconds", {})
            seconds[phase] = seconds.get(phase, 0.0) + now - last
            last = now

        return tick
