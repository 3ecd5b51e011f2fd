"""The folder of a run: one process owns it at a time, and a run of other settings is not overwritten."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any

from graft.config import Config, dump_config
from graft.files import (
    append_row,
    free_megabytes,
    remove,
    remove_leftovers,
    write_json,
    write_text,
)
from graft.recipe.yaml_errors import explain_yaml
from graft.train.errors import RunStopped
from graft.trust.bounds import read_yaml
from graft.trust.masking import mask, masked
from graft.trust.ownership import sign

MAY_CHANGE = {
    "run.resume", "run.dir", "run.name", "run.save_every", "run.keep_last", "run.eval_every",
    "run.eval_tasks", "run.log_episodes", "run.trackers", "rollout.concurrency", "rollout.deadline",
    "rollout.drafts",
    "train.steps", "train.tokens_per_micro", "train.recompute", "model.device", "model.exact",
    "engine.kv_tokens", "engine.tp",
    "run.save_later", "engine.url", "engine.api_key_env", "engine.sync", "engine.exchange", "engine.args",
    "parallel.tp", "parallel.shard", "parallel.offload", "parallel.deadline",
    "cluster.address", "cluster.learners", "cluster.workers", "cluster.sync", "cluster.cpus",
    "cluster.gpus", "cluster.restarts", "agent.seconds", "agent.concurrency", "agent.host",
    "train.lr", "train.schedule", "train.warmup", "train.min_lr", "algo.critic_lr",
}  # fmt: skip
"""Keys that may change when a run is resumed; a change of any other key needs a new run."""

WARM_UP_MAY_CHANGE = {
    "sft.steps", "sft.epochs", "sft.lr", "sft.schedule", "sft.min_lr", "sft.warmup", "sft.eval_every",
    "sft.stop_at",
}  # fmt: skip
"""These too, until the first RL step: later nothing reads them."""

UNREPORTED = {"run.dir", "run.name", "run.resume"}
"""Keys whose changes are not reported: where the folder is, how it is opened."""

CHANGES = "changes.jsonl"
"""Settings that changed when the run was resumed: {"time": ..., "phase": "rl", "step": 40, "changed":
{"train.lr": [1e-06, 5e-07]}}, a line each time."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors that more free space solves."""

RESULTS = ("metrics.jsonl", "checkpoints", "episodes", "errors.log", "summary.json")
"""What a run leaves from its first step, or held-out evaluation, on."""

STOPPED = "stopped.json"
"""Why a run stopped: {"reason": ..., "time": seconds since 1970}."""


@contextmanager
def out_of_disk(folder: Path) -> Iterator[None]:
    """Turn failed writes into a RunStopped that says what to do."""
    try:
        yield
    except OSError as error:
        way_out = "set run.dir to a folder that exists and that you may write to"
        if error.errno in FULL:
            way_out = f"{free_megabytes(folder):,.0f} MB are free there: free some space"
        raise RunStopped(
            f"cannot write to {folder} ({error}); {way_out}, and run the same command again. "
            "Complete checkpoints are intact"
        ) from error


class RunFolder:
    """`config.yaml`, `metrics.jsonl`, `episodes/`, `checkpoints/`, `tensorboard/`, `summary.json`."""

    def __init__(self, config: Config) -> None:
        self.path = Path(config.run.dir) / config.run.name
        self.config = config
        self.changed: dict[str, tuple[Any, Any]] = {}
        """Settings that changed since the run was last started: key -> old value, new value."""
        self.is_ours = False
        """Whether this process owns the folder."""
        self.is_new = False
        """Whether this process made the folder."""
        self._lock: Any = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def has_checkpoint(self) -> bool:
        return any(self.checkpoints.glob("*/state.json"))

    def claim(self) -> None:
        """Take ownership of the folder, or raise with the reason."""
        with out_of_disk(Path(self.config.run.dir)):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # what a policy and its tools wrote is for this user; an existing folder keeps its mode
            with suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
                self.is_new = True
            self._take_lock()
            before = self.path / "config.yaml"
            if before.exists():
                self._same_run(before)
            self.is_ours = True

    def begin(self) -> None:
        """Write the settings; a finished run keeps those it was trained with."""
        with out_of_disk(self.path):
            remove_leftovers(self.path)
            remove(self.path / STOPPED)
            write_text(self.path / "config.yaml", dump_config(self.config))
            sign(self.path / "config.yaml")

    def _take_lock(self) -> None:
        # the kernel releases an flock when its process ends: no stale lock after kill -9
        import fcntl

        self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunStopped(
                f"another process is running in {self.path}; wait for it, or give this run "
                "another run.name"
            ) from error

    def _same_run(self, before: Path) -> None:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
        from yaml import YAMLError

        if not self.has_checkpoint:
            return
        try:
            old: Any = OmegaConf.to_container(OmegaConf.load(StringIO(read_yaml(before))))
        except (YAMLError, OmegaConfBaseException, ValueError) as error:
            raise RunStopped(
                f"{before} is damaged: {explain_yaml(error)}. It has the settings that the run began with; "
                "remove it, and the same command resumes with those of the recipe"
            ) from error
        differing = differences(old, self.config)
        has_rl = any(self.checkpoints.glob("rl-*/state.json"))
        allowed = MAY_CHANGE if has_rl else MAY_CHANGE | WARM_UP_MAY_CHANGE
        refused = [
            f"{key}: {was!r} -> {now!r}"
            + (", and the warm-up is over" * (key in WARM_UP_MAY_CHANGE))
            for key, (was, now) in differing.items()
            if key not in allowed
        ]
        if refused:
            raise RunStopped(
                f"{self.path} holds a run with other settings ({'; '.join(refused)}). Give this run "
                f"another run.name, with model.path={self.path} model.shape={{}} if it is to start from "
                "these weights, or remove the folder to start over. Learning rate, steps and what is "
                "logged, saved or evaluated may change"
            )
        self.changed = {key: both for key, both in differing.items() if key not in UNREPORTED}
        if not self.config.run.resume:
            raise RunStopped(
                f"{self.path} holds checkpoints and run.resume is false. Give this run another "
                "run.name, or remove the folder to start over"
            )

    def note_changes(self, phase: str, step: int) -> list[str]:
        """Record settings that changed after this step, and return a line for each."""
        if not self.changed:
            return []
        entry = {"time": time.time(), "phase": phase, "step": step, "changed": self.changed}
        with out_of_disk(self.path):
            append_row(self.path / CHANGES, entry)
        where = f"from {phase} step {step + 1} on"
        return [f"{key}: {was!r} -> {now!r} {where}" for key, (was, now) in self.changed.items()]

    def stopped(self, reason: str) -> None:
        """Record why the run ended early; removed when it continues. Without a step, give the name back."""
        if self.is_new and not self._has_results():
            shutil.rmtree(self.path, ignore_errors=True)
            return
        with suppress(OSError):  # the disk may be the reason
            write_json(self.path / STOPPED, {"reason": mask(reason), "time": time.time()})

    def _has_results(self) -> bool:
        """Whether a step, an evaluation or a traceback is there; an empty log is no result."""
        files = (
            file for name in RESULTS for file in (self.path / name, *self.path.glob(f"{name}/**/*"))
        )
        return any(file.is_file() and file.stat().st_size for file in files)

    def interruption_note(self) -> str:
        if not self.has_checkpoint:
            return "interrupted before the first checkpoint; nothing was saved"
        saved = f"the progress is saved in {self.path}"
        return f"interrupted; {saved}, and the same command resumes from there"

    def summary(self, values: dict[str, Any]) -> None:
        with out_of_disk(self.path):
            write_json(self.path / "summary.json", values)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()


def differences(old: dict[str, Any], new: Config) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ; a key that the file lacks counts as its default.

    Secrets are compared as they are written.
    """
    found: dict[str, tuple[Any, Any]] = {}
    defaults = {name: info.default for name, info in Config.model_fields.items()}
    resolved = masked(new.model_dump(mode="json"))
    for section, values in new.written().items():
        before = defaults[section].model_dump(mode="json") | masked(old.get(section) or {})
        for key, value in values.items():
            if before[key] not in (value, resolved[section][key]):
                found[f"{section}.{key}"] = before[key], value
    return found
