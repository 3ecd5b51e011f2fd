"""One run, read from its folder: settings, progress, status, scores, alarms; and runs found by name."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from graft.config import ConfigError
from graft.files import parse_object, read_object
from graft.runs.curves import Curves, is_step, numbers, order
from graft.runs.json_lines import GrowingJsonl, lines_from_the_end
from graft.runs.lock import is_held
from graft.train.run_dir.names import is_run, named
from graft.train.run_dir.trackers import PHASES, Phase
from graft.trust.bounds import read_yaml
from graft.trust.links import check_shown_run
from graft.trust.masking import masked


class RunStatus(StrEnum):
    RUNNING = "running"
    """A process holds the folder."""
    DONE = "done"
    """The run reached its end and wrote its summary."""
    FAILED = "failed"
    """The run stopped on an error: `RunRecord.reason` says why."""
    STOPPED = "stopped"
    """The run was interrupted or killed; the same command resumes from the newest checkpoint."""


class RunRecord:
    """One run, read from its folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.curves = _no_curves()
        self._lines = GrowingJsonl(path / "metrics.jsonl")

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def refresh(self) -> int:
        """Read the metrics written since the last call into `curves`; the number of new steps."""
        count, rewritten = 0, self._lines.rewritten
        rows = self._lines.new()
        if self._lines.rewritten != rewritten:  # the run resumed from an earlier step
            self.curves = _no_curves()
        for row in rows:
            if is_step(row):
                self.curves[row["phase"]].add(row)
                count += 1
        return count

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """The recipe with all its defaults, by section; empty where it cannot be read."""
        import yaml

        loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        try:
            values: Any = yaml.load(read_yaml(self.path / "config.yaml"), Loader=loader)
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        if not isinstance(values, dict):
            return {}
        sections: dict[Any, Any] = values
        # older versions wrote secrets in clear
        return {
            str(name): masked(keys) for name, keys in sections.items() if isinstance(keys, dict)
        }

    @property
    def summary(self) -> dict[str, Any]:
        """What a run writes when it ends; empty until then."""
        return read_object(self.path / "summary.json")

    @property
    def reason(self) -> str:
        """The error that stopped the run, in its own words; "" if none was recorded."""
        return str(read_object(self.path / "stopped.json").get("reason", ""))

    @property
    def last(self) -> dict[str, Any] | None:
        """The newest whole line of the metrics, found from the end of the file."""
        for line in lines_from_the_end(self.path / "metrics.jsonl"):
            row = parse_object(line)
            if row is not None and is_step(row):
                return row
        return None

    @property
    def checkpoint(self) -> Path | None:
        """The newest complete checkpoint: a stopped run resumes there."""
        found: dict[tuple[int, int], Path] = {}
        for state in (self.path / "checkpoints").glob("*-*/state.json"):
            phase, _, step = state.parent.name.partition("-")
            if phase in PHASES and step.isdigit():
                found[order(phase, int(step))] = state.parent
        return found[max(found)] if found else None

    @property
    def saved_state(self) -> dict[str, Any]:
        """What the loop saved in that checkpoint: scores before training, seconds per phase."""
        saved = self.checkpoint
        return {} if saved is None else read_object(saved / "state.json")

    @property
    def status(self) -> RunStatus:
        if is_held(self.path / ".lock"):
            return RunStatus.RUNNING
        last = self.last
        if self._has_ended(last):
            return RunStatus.DONE
        return RunStatus.FAILED if self.reason or self._has_failed(last) else RunStatus.STOPPED

    def _has_ended(self, last: Mapping[str, Any] | None) -> bool:
        """Whether the summary is of the last step; an older one is from before the run was resumed."""
        summary = self.summary
        if not summary:
            return False
        phase, _, step = Path(str(summary.get("checkpoint", ""))).name.partition("-")
        if not step.isdigit() or phase not in PHASES:  # no checkpoint named: compare file times
            return last is None or _changed(self.path / "summary.json") >= _changed(
                self.path / "metrics.jsonl"
            )
        if last is not None and order(last["phase"], last["step"]) > order(phase, int(step)):
            return False
        wanted = _count(self.config.get("train", {}).get("steps"))  # may have been raised since
        return (int(step) if phase == "rl" else 0) >= wanted

    def _has_failed(self, last: Mapping[str, Any] | None) -> bool:
        """Whether the step after the last one is among the batches that could not be learned from."""
        then = 0 if last is None else int(last["step"])
        awaited = {then + 1} | ({1} if last is not None and last["phase"] == "sft" else set())
        failed = {_step_of(path) for path in (self.path / "failed").glob("step_*.jsonl")}
        return bool(failed & awaited)

    def total_steps(self, phase: Phase, row: Mapping[str, Any] | None = None) -> int | None:
        """The number of steps of a phase; None where it is not known.

        A length in epochs is converted with the help of a line of metrics: 2 epochs, of which step 30
        completed 0.25, make 240 steps.
        """
        section = self.config.get("train" if phase == "rl" else "sft", {})
        if steps := _count(section.get("steps")):
            return steps
        done = numbers(row or {}).get("epoch", 0.0)
        epochs = section.get("epochs") if phase == "sft" else None
        if row is None or not done > 0 or not isinstance(epochs, int | float):
            return None
        return max(int(row["step"]), math.ceil(epochs / done * int(row["step"]) - 1e-6))

    @property
    def scores(self) -> tuple[dict[str, float], dict[str, float]]:
        """Held-out scores before and after; unknown ones are empty."""
        summary = self.summary
        before = summary.get("before") or self.saved_state.get("before")
        return _scores(before), _scores(summary.get("after"))

    @property
    def leakage(self) -> str:
        """How many held-out tasks the run trains on, in words: its scores measure memory too; "" if none."""
        found = self.summary.get("leakage") or self.saved_state.get("leakage")
        return str(found.get("note", "")) if isinstance(found, dict) else ""

    @property
    def last_activity(self) -> float:
        """The time at which the run last wrote anything, in seconds since the epoch; 0.0 if it never did."""
        names = ("metrics.jsonl", "summary.json", "alarms.jsonl", "config.yaml", ".lock")
        folders = ("episodes", "checkpoints", "failed", "learned")
        return max(_changed(self.path / name) for name in (*names, *folders))

    def silent_for(self, now: float | None = None) -> float:
        """Seconds since the last sign of activity if the next one is overdue, else 0.0.

        Overdue means more than five times the last step's time, and more than a minute.
        """
        waited = (time.time() if now is None else now) - self.last_activity
        took = numbers(self.last or {}).get("step_time", 0.0)
        return waited if waited > max(60.0, 5 * took) else 0.0

    @property
    def size(self) -> int:
        """Bytes that the folder takes on the disk."""
        total = 0
        for folder, _, files in os.walk(self.path):
            for name in files:
                try:
                    total += (Path(folder) / name).lstat().st_blocks * 512
                except OSError:  # a checkpoint that is just being replaced
                    continue
        return total

    @property
    def alarms(self) -> list[dict[str, Any]]:
        """The alarms of the run, each about one of its metrics."""
        return [
            {
                "step": row["step"] if isinstance(row.get("step"), int) else 0,
                **{name: str(row.get(name, "")) for name in ("phase", "metric", "level", "text")},
            }
            for row in GrowingJsonl(self.path / "alarms.jsonl").new()
        ]


def _no_curves() -> dict[Phase, Curves]:
    return {phase: Curves() for phase in PHASES}


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _scores(given: Any) -> dict[str, float]:
    return numbers(given) if isinstance(given, dict) else {}


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _step_of(path: Path) -> int | None:
    number = path.stem.removeprefix("step_")
    return int(number) if number.isdecimal() and len(number) < 18 else None


def find_run(given: str) -> RunRecord:
    """The run with this folder, or with this name under `runs`."""
    path = named(given)
    if is_run(path):
        check_shown_run(path)
        return RunRecord(path)
    if not path.exists():
        raise ConfigError(
            f"no run '{given}': there is no such folder, nor one in runs/; `graft runs` lists them"
        )
    if inside := find_runs(path):
        names = ", ".join(str(run) for run in inside[:5])
        more = f" and {len(inside) - 5} more" if len(inside) > 5 else ""
        raise ConfigError(f"'{given}' is a folder of runs ({names}{more}); name one of them")
    raise ConfigError(
        f"'{given}' is no run: it holds neither config.yaml nor metrics.jsonl, which "
        "`graft train` writes"
    )


def find_runs(folder: Path, depth: int = 3) -> list[Path]:
    """Runs in a folder and in folders of it, by name; a run holds no other runs."""
    if is_run(folder):
        return [folder]
    if not depth:
        return []
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return []
    inner = [one for one in entries if not one.name.startswith(".") and one.is_dir()]
    return [run for one in inner for run in find_runs(one, depth - 1)]
