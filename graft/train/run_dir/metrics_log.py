"""The metrics of a run: one JSON line per step in `metrics.jsonl`, mirrored to the run's trackers.

TensorBoard and other trackers are copies: one that fails is dropped with a warning, and training continues.
`metrics.jsonl` and `episodes/` must not fail: a full disk stops the run with the name of the file.

    metrics_log.log(12, {"reward": 0.5, "loss": nan, "tools/failure_frequency": 0.0})
    {"phase": "rl", "step": 12, "loss": null, "reward": 0.5, "tools/failure_frequency": 0.0,
     "nonfinite": ["loss"]}
"""

from __future__ import annotations

import errno
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from graft.files import (
    JsonlLog,
    append_row,
    new_file,
    parse_object,
    remove,
    remove_leftovers,
    sync,
)
from graft.registry import resolve
from graft.train.run_dir.trackers import PHASES, TRACKERS, Phase, Tracker
from graft.trust.bounds import check_is_file
from graft.trust.masking import mask_values
from graft.types import Episode
from graft.user_code import UserObject, refusal

METHODS = ("log", "truncate_after", "close")
"""Methods of a tracker."""
RESERVED = ("phase", "step", "nonfinite")


class MetricsLog:
    """Writes the metrics of one run and feeds its trackers. Appends to an existing file."""

    def __init__(
        self,
        folder: str | Path,
        trackers: Iterable[str] = ("tensorboard",),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        factories = {name: resolve(name, TRACKERS, "tracker") for name in trackers}
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "metrics.jsonl"
        self._log = JsonlLog(self.path)
        self._folders = self.folder / "episodes", self.folder / "learned"
        self._trackers: dict[str, Tracker] = {}
        for name, factory in factories.items():
            try:
                self._trackers[name] = factory(self.folder, config or {})
            except ImportError as error:  # a missing package is an error before the first step
                self.close()
                package = "graft-rl[wandb]" if name == "wandb" else error.name
                raise ImportError(
                    f"tracker {name!r} cannot import {error.name}: pip install {package}, "
                    "or leave it out of the trackers"
                ) from error
            except Exception as error:  # not logged in, no network, ...: train without it
                self._drop(name, error)
            else:
                self._check(factory, self._trackers[name])

    def log(self, step: int, metrics: Mapping[str, float], phase: Phase = "rl") -> None:
        """Append one line to `metrics.jsonl` and log to the trackers."""
        values = {name: _number(value) for name, value in metrics.items()}
        self._log.append(record(step, values, phase))
        self._each_tracker(lambda tracker: tracker.log(step, values, phase))

    def episodes(self, step: int, episodes: Iterable[Episode]) -> Path:
        """Write `episodes/step_000012.jsonl`, one line per task. Written atomically."""
        path = self.folder / "episodes" / f"step_{step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with new_file(path) as aside, aside.open("w", encoding="utf-8") as file:
            file.writelines(map(episode_line, episodes))
        return path

    def alarm(self, alarm: Mapping[str, Any]) -> None:
        """Append one line to `alarms.jsonl`."""
        append_row(self.folder / "alarms.jsonl", alarm)

    def truncate_after(self, phase: Phase, step: int) -> None:
        """Remove everything after `step` of `phase`, where a run resumes.

        After ("rl", 20) sft lines stay, and rl lines up to 20; after ("sft", 20) no rl line stays.
        """
        last = _order(phase, step)
        _truncate_after(last, self._log)
        for folder in self._folders:
            for path in folder.glob("step_*"):
                if _order("rl", int(path.name[5:].partition(".")[0])) > last:
                    remove(path)
            remove_leftovers(folder)
        if (alarms := self.folder / "alarms.jsonl").exists():
            log = JsonlLog(alarms)
            _truncate_after(last, log)
            log.close()
            if not alarms.stat().st_size:  # as if there had been none
                remove(alarms)
        self._each_tracker(lambda tracker: tracker.truncate_after(phase, step))

    def sync(self) -> None:
        """Everything so far survives a power cut, as the checkpoint that is written next does."""
        self._log.sync()
        for folder in (*self._folders, self.folder):
            if folder.is_dir():
                sync(folder)

    def close(self) -> None:
        self._log.close()
        self._each_tracker(lambda tracker: tracker.close())
        self._trackers.clear()

    def _check(self, factory: Any, made: Tracker) -> None:
        missing = [one for one in METHODS if not callable(getattr(made, one, None))]
        if missing:
            self._trackers.clear()
            self.close()
            wanted = f"a tracker with {', '.join(METHODS)}; it lacks {', '.join(missing)}"
            raise refusal(UserObject(factory, "tracker"), made, wanted)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _each_tracker(self, what: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                what(tracker)
            except Exception as error:  # of any library: a tracker must not end a training run
                self._drop(name, error)

    def _drop(self, name: str, error: Exception) -> None:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise error  # checkpoints would fail next
        self._trackers.pop(name, None)
        warnings.warn(
            f"tracker {name!r} failed and is off for the rest of this run; metrics.jsonl is still written. "
            f"{type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=4,
        )


def record(step: int, metrics: Mapping[str, float], phase: Phase) -> dict[str, Any]:
    """The JSON object of one line: plain names first, then `area/name` by area.

    JSON has no NaN: such a value becomes null and its name is listed under "nonfinite".
    """
    if clash := sorted(set(RESERVED) & set(metrics)):
        raise ValueError(f"metrics may not be named {', '.join(clash)}: every line has these keys")
    nonfinite = sorted(name for name, value in metrics.items() if not math.isfinite(value))
    names = sorted(metrics, key=lambda name: ("/" in name, name))
    values = {name: None if name in nonfinite else metrics[name] for name in names}
    line = {"phase": phase, "step": step, **values}
    return {**line, "nonfinite": nonfinite} if nonfinite else line


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, without a line that a killed run left incomplete."""
    records: list[dict[str, Any]] = []
    check_is_file(Path(path))
    for line in Path(path).read_bytes().split(b"\n"):
        row = parse_object(line)
        if row is not None and row.get("phase") in PHASES and "step" in row:
            records.append(row)
    return records


def _order(phase: Phase, step: int) -> tuple[int, int]:
    return PHASES.index(phase), step


def _number(value: Any) -> float:
    """A plain int or float; numpy scalars and one-element tensors are converted."""
    return value if type(value) in (int, float) else float(value)


def _truncate_after(last: tuple[int, int], log: JsonlLog) -> None:
    kept = [row for row in read_metrics(log.path) if _order(row["phase"], row["step"]) <= last]
    log.rewrite(kept)


def episode_line(episode: Episode) -> str:
    """An episode as one line of a file."""
    try:
        return mask_values(episode.dumps()) + "\n"
    except ValueError as error:
        raise ValueError(
            f"the episode of task {episode.task.id!r} cannot be written as JSON ({error}); look "
            "for NaN or inf among its log-probs, entropies, rewards and metrics"
        ) from error
