"""The folder of a run: one owner at a time, nothing half-written, nothing overwritten by mistake."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from graft.config import Config, dump_config
from graft.models.save import write_json, write_whole


class RunStopped(RuntimeError):
    """The run cannot go on; the text says why and what to do. What was saved is intact."""


MAY_CHANGE = {
    "run.resume", "run.dir", "run.save_every", "run.keep_last", "run.eval_every", "run.eval_tasks",
    "run.log_episodes", "run.trackers", "rollout.concurrency", "rollout.deadline", "train.steps",
    "train.tokens_per_micro", "train.recompute", "model.device", "engine.kv_tokens",
    "run.save_later", "engine.url", "engine.sync", "engine.exchange", "engine.args",
    "parallel.tp", "parallel.shard", "parallel.offload", "parallel.deadline",
    "cluster.address", "cluster.learners", "cluster.workers", "cluster.sync", "cluster.cpus",
    "cluster.gpus", "cluster.restarts",
}  # fmt: skip
"""Keys that may differ between a run and its resumption; any other would make it another run."""


STOPPED = "stopped.json"
"""Why a run ended by itself: {"reason": ..., "time": seconds since 1970}."""


@contextmanager
def out_of_disk(folder: Path) -> Iterator[None]:
    """Turn failed writes into a stop that says how much room is left."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(folder).free / 1e6 if folder.exists() else 0.0
        raise RunStopped(
            f"cannot write to {folder} ({error}); {free:,.0f} MB are free there. The last good "
            "checkpoint is intact: make room and run the same command again to go on."
        ) from error


class RunFolder:
    """`config.yaml`, `metrics.jsonl`, `episodes/`, `checkpoints/`, `tensorboard/`, `summary.json`."""

    def __init__(self, config: Config) -> None:
        self.path = Path(config.run.dir) / config.run.name
        self.config = config
        self._lock: Any = None
        self._has_claimed = False

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def is_ours(self) -> bool:
        """Whether this process runs it, rather than having found another there."""
        return self._has_claimed

    def claim(self) -> None:
        """Make the folder ours, or say why it cannot be."""
        with out_of_disk(Path(self.config.run.dir)):
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            before = self.path / "config.yaml"
            if before.exists():
                self._same_run(before)
            (self.path / STOPPED).unlink(missing_ok=True)
            resolved = dump_config(self.config)
            write_whole(before, lambda to: to.write_text(resolved, encoding="utf-8"))
            self._has_claimed = True

    def _take_lock(self) -> None:
        # an flock ends with its process, however that ends: no stale lock after kill -9
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

        old: Any = OmegaConf.to_container(OmegaConf.load(before))
        new = self.config.model_dump(mode="json")
        changed = [
            f"{section}.{key}: {old.get(section, {}).get(key)!r} -> {value!r}"
            for section, keys in new.items()
            for key, value in keys.items()
            if f"{section}.{key}" not in MAY_CHANGE and old.get(section, {}).get(key) != value
        ]
        has_checkpoint = any(self.checkpoints.glob("*/state.json"))
        if has_checkpoint and changed:
            raise RunStopped(
                f"{self.path} holds a run with other settings ({'; '.join(changed)}). Give this run "
                "another run.name, or remove the folder to start over"
            )
        if has_checkpoint and not self.config.run.resume:
            raise RunStopped(
                f"{self.path} holds checkpoints and run.resume is false. Give this run another "
                "run.name, or remove the folder to start over"
            )

    def stopped(self, reason: str) -> None:
        """Why the run ended before it was done; forgotten when it goes on."""
        with suppress(OSError):  # the disk may be the reason
            write_json(self.path / STOPPED, {"reason": reason, "time": time.time()})

    def summary(self, values: dict[str, Any]) -> None:
        with out_of_disk(self.path):
            write_json(self.path / "summary.json", values)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
