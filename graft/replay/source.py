"""What a replay starts from: the settings of a run, its metrics, and the checkpoint before a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from graft.config import Config, ConfigError, TaskSection, load_config
from graft.evaluate.candidates import is_gone
from graft.models.io.load import ModelFileError
from graft.recipe.admission import NOT_OF_A_STEP
from graft.replay.recorded_step import CannotReplay
from graft.train.errors import RunStopped
from graft.train.run_dir.checkpoint import Checkpoint, checkpoints
from graft.train.run_dir.fingerprint import StepRecord
from graft.train.run_dir.metrics_log import read_metrics

CHANGEABLE = ("algo.", "train.")
"""Sections whose keys may be changed in a replay."""


def recorded_metrics(run: Path) -> dict[int, dict[str, float]]:
    try:
        lines = read_metrics(run / "metrics.jsonl")
    except OSError:
        return {}
    return {
        line["step"]: {
            name: math.nan if value is None else float(value)
            for name, value in line.items()
            if name != "step" and (value is None or isinstance(value, int | float))
        }
        for line in lines
        if line["phase"] == "rl" and isinstance(line["step"], int)
    }


def settings_of(run: Path, overrides: Sequence[str]) -> tuple[Config, Config]:
    """The run's settings, and the same with the overrides."""
    file = run / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"'{run}' has no config.yaml, so its settings are unknown")
    for override in overrides:
        if not override.startswith(CHANGEABLE):
            raise ConfigError(
                f"{override}: a replay may change algo.* and train.*; anything else "
                "would have given other episodes"
            )
    own, other = (load_config(str(file), one, unused=NOT_OF_A_STEP) for one in ((), overrides))
    return own, other


def choose_checkpoint(run: Path, step: int, start: int | None, config: Config) -> Checkpoint:
    existing = [c for c in checkpoints(run / "checkpoints") if c.phase == "rl"]
    there = ", ".join(c.path.name for c in existing) or "none of RL"
    if start is not None and start >= step:
        raise ConfigError(f"--from {start} is not before step {step}: it contains {start} steps")
    if start is not None:
        existing = [c for c in existing if c.step == start]
        if not existing:
            raise ConfigError(f"'{run}' has no checkpoint rl-{start:06d}; there are: {there}")
    earlier = [c for c in existing if c.step < step]
    if not earlier:
        section = config.run
        first = f"; steps from {existing[0].step + 1} on can be replayed" if existing else ""
        raise CannotReplay(
            f"'{run}' has no checkpoint from before step {step} (there are: {there}): one is written "
            f"every run.save_every={section.save_every} steps, and the last "
            f"run.keep_last={section.keep_last} are kept{first}"
        )
    return earlier[-1]


def prepared(
    config: Config, record: StepRecord | None, device: str, overrides: Sequence[str] = ()
) -> Config:
    """The run's settings for one process that attempts no tasks: no environment, no reward."""
    keys: dict[str, object] = {"parallel.tp": 1, "engine.tp": 1}
    if device:
        keys["model.device"] = device
    if record is not None:
        keys["model.dtype"] = record.dtype
        config = with_rates(config, record, overrides)
    return config.changed(keys).model_copy(update={"task": TaskSection()})


def with_rates(config: Config, record: StepRecord, overrides: Sequence[str] = ()) -> Config:
    """The configuration with the learning rates of the step, which may have been changed on resume."""
    rates = {**record.rates, "train.steps": record.train_steps}
    return config.changed({k: value for k, value in rates.items() if not is_among(k, overrides)})


def is_among(key: str, overrides: Sequence[str]) -> bool:
    return any(override.startswith(f"{key}=") for override in overrides)


@contextmanager
def explain_removal(checkpoint: Checkpoint, config: Config) -> Iterator[None]:
    """A run that still trains may remove a checkpoint while it is read."""
    try:
        yield
    except (OSError, ModelFileError, RunStopped) as error:
        if not is_gone(checkpoint.path):
            raise
        raise CannotReplay(
            f"{checkpoint.path.name} was removed while it was read: the run still trains and keeps its last "
            f"run.keep_last={config.run.keep_last}; try a later step"
        ) from error
