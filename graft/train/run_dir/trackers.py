"""Trackers, which mirror a run's metrics, by name; `graft.train.run_dir.metrics_log` feeds them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from graft.files import write_text

Phase = Literal["sft", "rl"]
PHASES: tuple[Phase, ...] = ("sft", "rl")
"""In the order of a run; each phase counts its own steps."""


class Tracker(Protocol):
    """A mirror of the metrics, made by a factory `(run folder, config) -> Tracker`."""

    def log(self, step: int, metrics: Mapping[str, float], phase: Phase) -> None: ...
    def truncate_after(self, phase: Phase, step: int) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in `tensorboard/sft` and `tensorboard/rl`.

    Two folders: both phases count from the start, and a purge hides a step in its whole folder.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open: Callable[..., SummaryWriter] = SummaryWriter
        self._folder = folder / "tensorboard"
        self._writers: dict[Phase, SummaryWriter] = {}
        self._purge: dict[Phase, int] = {}

    def log(self, step: int, metrics: Mapping[str, float], phase: Phase) -> None:
        if phase not in self._writers:
            if phase in self._purge:
                _wait_for_a_new_second(self._folder / phase)
            self._writers[phase] = self._open(
                str(self._folder / phase), purge_step=self._purge.get(phase), flush_secs=10
            )
        for name, value in metrics.items():
            self._writers[phase].add_scalar(name, value, step)

    def truncate_after(self, phase: Phase, step: int) -> None:
        self.close()  # only a new event file can purge steps of older ones
        self._purge[phase] = step + 1
        for later in PHASES[PHASES.index(phase) + 1 :]:
            self._purge[later] = 0

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()


def _wait_for_a_new_second(folder: Path) -> None:
    """Wait until the clock is past the second of the newest event file.

    Files are read in the order of their names: a second, the host, a process number, a counter. Of one
    second the counter 10 comes before 9, and a purge that is read first hides nothing.
    """
    seconds = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")]
    if seconds and max(seconds) == int(time.time()):
        time.sleep(max(seconds) + 1 - time.time())


class Wandb:
    """A Weights & Biases run named after the folder; a resumed run continues it."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        id_file = folder / "wandb_id"
        run_id = id_file.read_text().strip() if id_file.exists() else wandb.util.generate_id()
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "graft"),
            name=folder.resolve().name,
            id=run_id,
            resume="allow",
            dir=str(folder),
            config=dict(config),
        )
        write_text(id_file, run_id + "\n")
        for phase in PHASES:  # wandb's step only grows, while each phase counts from 1
            self._run.define_metric(f"{phase}/step")
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")

    def log(self, step: int, metrics: Mapping[str, float], phase: Phase) -> None:
        named = {f"{phase}/{name}": value for name, value in metrics.items()}
        self._run.log({**named, f"{phase}/step": step})

    def truncate_after(self, phase: Phase, step: int) -> None:
        """Nothing to do: the server keeps the points, and repeated steps are equal."""

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
}
