"""The folder of a run, read while it grows: what was asked, how far it is, how it stands.

    record = Record(Path("runs/quickstart"))
    record.status             Status.RUNNING
    record.last               {"phase": "rl", "step": 12, "reward": 0.5, ...}
    record.curves["rl"]["reward"]        array('d', [0.01, ..., 0.5])

Nothing here writes or locks anything, so a look never disturbs a run, and no torch is loaded. Files
may be in the middle of being written: a line counts when its end is there. `refresh` reads only what
was added since the last time; a run that is resumed cuts its metrics back, and then all is read anew.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import struct
import sys
import time
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from pydantic_core import from_json

from graft.config import ConfigError
from graft.train.trackers import PHASES, Phase
from graft.types import Episode

PHASE_WORDS: Mapping[Phase, str] = {"sft": "warm-up", "rl": "reinforce"}
"""What a phase is called where people read, as in the display of a run."""

CHUNK = 1 << 20
"""Bytes read at a time."""
MARK = 64
"""Bytes before the place that was read up to; other ones there mean that the file was rewritten."""


class Status(StrEnum):
    RUNNING = "running"
    """A process holds the folder."""
    DONE = "done"
    """It came to its end and wrote its summary."""
    FAILED = "failed"
    """It stopped by itself, at numbers that were not finite; the batch is in `failed/`."""
    STOPPED = "stopped"
    """It was interrupted or killed; the same command goes on from the newest checkpoint."""


class JsonLines:
    """The JSON objects of a file that grows, each handed out once.

    a file `{"step": 1}⏎{"st`   new() -> {"step": 1}      the half line waits for its end
    then    `ep": 2}⏎` comes    new() -> {"step": 2}
    the file is cut to line 1   new() -> {"step": 1}      and `rewritten` was 1 higher before it
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rewritten = 0
        self._at = 0
        self._mark = b""

    def new(self) -> Iterator[dict[str, Any]]:
        """What came since the last call, to be read to its end; lines without an object are left out.

        Whether the file was rewritten is known before the first line comes.
        """
        try:
            file = self.path.open("rb")
        except OSError:  # not there yet, or no longer
            if self._at:
                self._start_over()
            return iter(())
        if self._at and not self._is_as_before(file):
            self._start_over()
        return self._read(file)

    def _read(self, file: IO[bytes]) -> Iterator[dict[str, Any]]:
        with file:
            file.seek(self._at)
            rest: list[bytes] = []
            while chunk := file.read(CHUNK):
                whole, newline, tail = chunk.rpartition(b"\n")
                if not newline:  # a line longer than the chunk: its end is further on
                    rest.append(chunk)
                    continue
                lines = b"".join((*rest, whole, newline))
                rest = [tail]
                self._at += len(lines)
                self._mark = lines[-MARK:]
                for line in lines.split(b"\n"):
                    if line and (row := parse_object(line)) is not None:
                        yield row

    def _is_as_before(self, file: IO[bytes]) -> bool:
        file.seek(self._at - len(self._mark))
        return file.read(len(self._mark)) == self._mark

    def _start_over(self) -> None:
        self._at, self._mark = 0, b""
        self.rewritten += 1


@dataclass(slots=True)
class Curves:
    """The metrics of one phase as columns: eight bytes a number, NaN where a step has none."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    columns: dict[str, array[float]] = field(default_factory=dict[str, "array[float]"])

    def add(self, row: Mapping[str, Any]) -> None:
        before = len(self.steps)
        self.steps.append(int(row["step"]))
        for name, value in numbers(row).items():
            column = self.columns.get(name)
            if column is None:
                column = self.columns[name] = array("d")
            if len(column) < before:
                _pad(column, before)
            column.append(value)

    def __getitem__(self, name: str) -> array[float]:
        """One number per step."""
        column = self.columns.get(name, array("d"))
        _pad(column, len(self.steps))
        return column

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, slots=True)
class Alarm:
    """What a run said about itself when a number looked sick."""

    phase: str
    step: int
    metric: str
    level: str
    text: str


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint of the run."""

    path: Path
    phase: Phase
    step: int

    @property
    def state(self) -> dict[str, Any]:
        """What the loop wrote down beside the weights: scores before, seconds per phase."""
        return read_object(self.path / "state.json")


class Record:
    """One run, as its folder tells it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.curves = _no_curves()
        self._lines = JsonLines(path / "metrics.jsonl")

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def refresh(self) -> int:
        """Read the metrics that came since the last time into `curves`; how many steps came."""
        count, rewritten = 0, self._lines.rewritten
        rows = self._lines.new()
        if self._lines.rewritten != rewritten:  # the run went back: so do we
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
            text = (self.path / "config.yaml").read_text(encoding="utf-8")
            values: Any = yaml.load(text, Loader=loader)
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        if not isinstance(values, dict):
            return {}
        sections: dict[Any, Any] = values
        return {str(name): keys for name, keys in sections.items() if isinstance(keys, dict)}

    @property
    def summary(self) -> dict[str, Any]:
        """What a run writes when it ends; empty until then."""
        return read_object(self.path / "summary.json")

    @property
    def last(self) -> dict[str, Any] | None:
        """The newest whole line of the metrics, found from the end of the file."""
        for line in _lines_from_the_end(self.path / "metrics.jsonl"):
            row = parse_object(line)
            if row is not None and is_step(row):
                return row
        return None

    @property
    def checkpoint(self) -> Saved | None:
        """The newest complete one: where a stopped run goes on."""
        found: list[Saved] = []
        for state in (self.path / "checkpoints").glob("*-*/state.json"):
            phase, _, step = state.parent.name.partition("-")
            if phase in PHASES and step.isdigit():
                found.append(Saved(state.parent, phase, int(step)))
        return max(found, key=lambda one: order(one.phase, one.step)) if found else None

    @property
    def status(self) -> Status:
        if is_held(self.path / ".lock"):
            return Status.RUNNING
        last = self.last
        if self._has_ended(last):
            return Status.DONE
        return Status.FAILED if self._has_failed(last) else Status.STOPPED

    def _has_ended(self, last: Mapping[str, Any] | None) -> bool:
        """Whether the summary is of the last step: an older one is of a run that went on since."""
        summary = self.summary
        if not summary:
            return False
        phase, _, step = Path(str(summary.get("checkpoint", ""))).name.partition("-")
        if not step.isdigit() or phase not in PHASES:  # it does not say: then time must tell
            return last is None or _changed(self.path / "summary.json") >= _changed(
                self.path / "metrics.jsonl"
            )
        if last is not None and order(last["phase"], last["step"]) > order(phase, int(step)):
            return False
        asked = _count(self.config.get("train", {}).get("steps"))  # perhaps more, afterwards
        return (int(step) if phase == "rl" else 0) >= asked

    def _has_failed(self, last: Mapping[str, Any] | None) -> bool:
        """Whether the step after the last one is among the batches that could not be learned from."""
        then = 0 if last is None else int(last["step"])
        awaited = {then + 1} | ({1} if last is not None and last["phase"] == "sft" else set())
        failed = {_step_of(path) for path in (self.path / "failed").glob("step_*.jsonl")}
        return bool(failed & awaited)

    def total_steps(self, phase: Phase, row: Mapping[str, Any] | None = None) -> int | None:
        """How many a phase has; None where nobody knows.

        Passes over a file are counted in epochs, so there a line of metrics has to tell: 2 epochs, and
        step 30 ended 0.25 of one, make 240 steps.
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
        """Held-out scores before and after; what is not known yet is empty."""
        summary = self.summary
        before = summary.get("before")
        if not before and self.checkpoint is not None:
            before = self.checkpoint.state.get("before")
        return _scores(before), _scores(summary.get("after"))

    @property
    def last_activity(self) -> float:
        """When the run last wrote anything, in seconds since the epoch; 0.0 if it never did."""
        names = ("metrics.jsonl", "summary.json", "alarms.jsonl", "config.yaml", ".lock")
        folders = ("episodes", "checkpoints", "failed", "learned")
        return max(_changed(self.path / name) for name in (*names, *folders))

    def silent_for(self, now: float | None = None) -> float:
        """Seconds without a word where the next one is overdue, else 0.0.

        Overdue is what takes five times as long as the last step took, and more than a minute.
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
    def alarms(self) -> list[Alarm]:
        rows = JsonLines(self.path / "alarms.jsonl").new()
        return [
            Alarm(
                str(row.get("phase", "")),
                row["step"] if isinstance(row.get("step"), int) else 0,
                str(row.get("metric", "")),
                str(row.get("level", "")),
                str(row.get("text", "")),
            )
            for row in rows
        ]

    @property
    def episode_steps(self) -> list[int]:
        """Steps whose episodes were written down, in order."""
        steps = (_step_of(path) for path in (self.path / "episodes").glob("step_*.jsonl"))
        return sorted(step for step in steps if step is not None)

    def episodes(self, step: int, most_bytes: int) -> Iterator[Episode]:
        """Those of one step, one in memory at a time, up to `most_bytes` of their file.

        What is no episode is left out, as is one that the limit would cut.
        """
        path = self.path / "episodes" / f"step_{step:06d}.jsonl"
        try:
            file = path.open("rb")
        except OSError:
            return
        with file:
            while (left := most_bytes - file.tell()) > 0:
                line = file.readline(left)
                if not line.endswith(b"\n"):
                    return
                try:
                    yield Episode.loads(line.decode("utf-8", "replace"))
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    continue


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("metrics.jsonl", "config.yaml"))


def find_run(given: str) -> Record:
    """The run that a person names: its folder, or its name under `runs`."""
    for path in (Path(given), Path("runs") / given):
        if is_run(path):
            return Record(path)
    path = Path(given)
    if not path.exists():
        raise ConfigError(f"no run '{given}': there is no such folder, nor one in runs/")
    if inside := find_runs(path):
        names = ", ".join(str(run) for run in inside[:5])
        more = f" and {len(inside) - 5} more" if len(inside) > 5 else ""
        raise ConfigError(f"'{given}' is no run but holds some: {names}{more}; give one of them")
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


def is_held(lock: Path) -> bool:
    """Whether a process holds the flock on this file.

    It is looked up, never tried: a lock of ours, however short, could be the one that makes a run
    fail which starts at that moment. Linux lists flocks in /proc/locks; where flocks are byte-range
    locks (network file systems, macOS), F_GETLK tells of them. A process in another container on the
    same machine is not seen.
    """
    try:
        asked = lock.stat()
    except OSError:
        return False
    return _is_listed(asked) or _blocks_ours(lock)


def _is_listed(asked: os.stat_result) -> bool:
    """`1: FLOCK  ADVISORY  WRITE 30506 fe:00:2179967 0 EOF`: holder, device and file."""
    try:
        listed = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    for fields in map(str.split, listed):
        if len(fields) < 6 or fields[1] != "FLOCK":  # "->" there: one that only waits
            continue
        major, minor, number = fields[5].split(":")
        if int(number) != asked.st_ino:
            continue
        if os.makedev(int(major, 16), int(minor, 16)) == asked.st_dev:
            return True
        if _has_open(fields[4], asked):  # btrfs and others show two device numbers
            return True
    return False


def _has_open(process: str, asked: os.stat_result) -> bool:
    try:
        for entry in os.scandir(f"/proc/{process}/fd"):
            if os.path.samestat(entry.stat(), asked):
                return True
    except OSError:  # somebody else's process, or it has just ended
        pass
    return False


def _blocks_ours(lock: Path) -> bool:
    # struct flock: Linux has type and whence in front, macOS behind start, length and process
    form, place = ("qqihh", 3) if sys.platform == "darwin" else ("hhqqi0q", 0)
    asked: list[int] = [0, 0, 0, 0, 0]
    asked[place] = fcntl.F_WRLCK
    try:
        with lock.open("rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(form, *asked))
    except OSError:
        return False
    return struct.unpack(form, answer)[place] != fcntl.F_UNLCK


def parse_object(line: bytes) -> dict[str, Any] | None:
    try:
        row = from_json(line)  # four times as fast as json, and a long run has many lines
    except ValueError:
        try:
            row = json.loads(line)  # takes half a surrogate pair, which the other does not
        except (ValueError, RecursionError):
            return None
    return row if isinstance(row, dict) else None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none."""
    try:
        return parse_object(path.read_bytes()) or {}
    except OSError:
        return {}


def is_step(row: Mapping[str, Any]) -> bool:
    step = row.get("step")
    return row.get("phase") in PHASES and isinstance(step, int) and abs(step) < 2**62


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a line. One that was not finite stands there as null and is NaN again.

    >>> numbers({"phase": "rl", "step": 12, "reward": 0.5, "loss": None, "nonfinite": ["loss"]})
    {'reward': 0.5, 'loss': nan}
    """
    found: dict[str, float] = {}
    for name, value in row.items():
        if type(value) is float:  # nearly all of them
            found[name] = value
        elif name == "step":
            continue
        elif value is None:
            found[name] = math.nan
        elif isinstance(value, int | float):
            try:
                found[name] = float(value)
            except OverflowError:  # an integer of hundreds of digits
                found[name] = math.nan
    return found


def order(phase: Phase, step: int) -> tuple[int, int]:
    """Steps of a run in the order it makes them."""
    return PHASES.index(phase), step


def _no_curves() -> dict[Phase, Curves]:
    return {phase: Curves() for phase in PHASES}


def _pad(column: array[float], length: int) -> None:
    if len(column) < length:
        column.extend([math.nan] * (length - len(column)))


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


def _lines_from_the_end(path: Path) -> Iterator[bytes]:
    """Whole lines of a file, the last first; of a line without an end nothing."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        start = file.seek(0, os.SEEK_END)
        head = b""  # of a line whose beginning was not read yet
        is_whole = False
        while start:
            length = min(1 << 16, start)
            start -= length
            file.seek(start)
            head, *lines = (file.read(length) + head).split(b"\n")
            for line in reversed(lines):
                if is_whole and line:
                    yield line
                is_whole = True
        if is_whole and head:
            yield head
