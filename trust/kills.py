"""Real SIGKILLs at random moments: a run is killed until it is done, and compared with one that was not.

The moments are uniform over the length of a run, so that they hit the start, SFT steps, evaluations, RL
steps, checkpoints and the summary. Victims are the main process alone, its whole process group, one rank or
the agent of torchrun, and a worker, the learner or everything of a Ray cluster.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests.command_line import Command, graft
from trust.bank import Row
from trust.tiny_runs import Comparison, compare, new_place, recipe_of

SMALL = 6
"""One for each kind of training in one process."""
FULL = 200
KILLS_OF_A_RUN = 7
PATIENCE = 300.0
POLL = 0.02
SPAN = 0.7
"""Of the length of a run, from its start: a kill comes in this part, and so most runs are killed."""
LENGTH = ["train.steps=5", "run.eval_every=2", "run.save_every=2", "run.keep_last=9"]
"""Longer runs, which do not save every step."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
HELD = "another process is running"
"""Said by a run whose folder belongs to a process that lives on for a moment."""


class Running(Protocol):
    """A command under way."""

    pid: int

    def poll(self) -> int | None: ...
    def output(self) -> str: ...


class Forked:
    """`graft ARGUMENTS` as a fork of a process that has imported everything, in a group of its own."""

    def __init__(self, arguments: list[str]) -> None:
        code = "import os; os.setpgrp(); from graft.cli import main; main()"
        self._command = Command(tuple(arguments), {}, code=code)
        self.pid = self._command.pid
        self._text: str | None = None

    def poll(self) -> int | None:
        code = self._command.poll()
        if code is not None and self._text is None:
            self._text = self._command.wait(5.0).stderr  # which removes its files
        return code

    def output(self) -> str:
        self.poll()
        return self._command.stderr if self._text is None else self._text


class Spawned:
    """A command in a session of its own."""

    def __init__(self, command: list[str]) -> None:
        self._screen = Path(tempfile.mkstemp(prefix="graft-kills-")[1])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
        with self._screen.open("wb") as screen:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def output(self) -> str:
        return self._screen.read_text(encoding="utf-8", errors="replace")


def graft_process(arguments: list[str]) -> Running:
    return Forked(arguments)


def torchrun_process(arguments: list[str]) -> Running:
    return Spawned([*TORCHRUN, "-m", "graft", *arguments, "parallel.deadline=60"])


def ray_process(arguments: list[str]) -> Running:
    settings = [
        "cluster.address=local",
        "cluster.workers=2",
        "cluster.cpus=0.5",
        "cluster.restarts=99",
    ]
    return Spawned([sys.executable, "-m", "graft", *arguments, *settings])


def main_alone(pid: int) -> list[int]:
    return [pid]


def everything(pid: int) -> list[int]:
    return [pid, *descendants(pid)]


def a_child(pid: int) -> list[int]:
    return children(pid)[-1:]


def called(title: str) -> Callable[[int], list[int]]:
    """One process whose command line begins with `title`, as Ray names its actors."""

    def find(pid: int) -> list[int]:
        return [one for one in descendants(pid) if command_line(one).startswith(title)][-1:]

    return find


@dataclass(frozen=True)
class Setting:
    """How runs of one row are started, and what is killed."""

    kind: str
    start: Callable[[list[str]], Running] = graft_process
    victims: tuple[Callable[[int], list[int]], ...] = (main_alone, everything)
    settings: list[str] = field(default_factory=list[str])
    is_timed: bool = False
    share: float = 0.14
    """Of all kills."""


SETTINGS: dict[str, Setting] = {
    "sft": Setting("sft", settings=["sft.steps=12", "run.save_every=3"]),
    "grpo": Setting("grpo", settings=[*LENGTH, "sft.steps=3"]),
    "arpo": Setting("arpo", settings=LENGTH),
    "cpo": Setting("cpo", settings=LENGTH),
    "lora": Setting("lora", settings=LENGTH),
    "async": Setting("async", settings=LENGTH, is_timed=True),
    "torchrun, 2 processes": Setting(
        "grpo",
        torchrun_process,
        (main_alone, everything, a_child),
        [*LENGTH, "sft.steps=3"],
        share=0.08,
    ),
    "Ray, 2 workers": Setting(
        "arpo",
        ray_process,
        (everything, main_alone, called("ray::RolloutWorker"), called("ray::LearnerActor")),
        LENGTH,
        share=0.08,
    ),
}


def run(count: int, seed: int) -> Iterator[Row]:
    """One row per way to start a run."""
    with new_place("kills") as name:
        place = Path(name)
        base = place / "base"
        if graft("train", *recipe_of("sft", base, base)).returncode:
            raise RuntimeError("the run for the base model failed")
        for number, (group, setting) in enumerate(SETTINGS.items()):
            if kills := round(count * setting.share):
                folder = place / str(number)
                yield _row(group, setting, folder, base / "run", kills, random.Random(seed))


def _row(
    group: str, setting: Setting, place: Path, base: Path, count: int, rng: random.Random
) -> Row:
    whole = Killed(setting, place / "whole", base, rng)
    seconds = whole.finish()
    row = Row("kills", group, count)
    done, victims, largest, runs = 0, dict[str, int](), 0.0, 0
    while done < count and not (whole.faults or len(row.failures) > 20):
        one = Killed(setting, place / str(runs), base, rng)
        kills = one.disturb(seconds, min(count - done, KILLS_OF_A_RUN))
        one.finish()
        seconds *= 1.0 if kills else 0.8  # it was over before its first kill
        found = one.compare(whole)
        done, runs, largest = done + kills, runs + 1, max(largest, found.largest)
        row.failures += [f"run {runs} ({one.log}): {fault}" for fault in found.faults]
        for name in one.log:
            victims[name] = victims.get(name, 0) + 1
    row.failures += whole.faults
    row.count = done
    row.measured = {"runs": runs, "seconds of a run": round(seconds, 1), **victims}
    row.measured["largest difference of diagnostics"] = largest
    return row


class Killed:
    """One run: killed now and then, then finished."""

    def __init__(self, setting: Setting, folder: Path, base: Path, rng: random.Random) -> None:
        self.setting, self.folder, self.rng = setting, folder, rng
        self.arguments = ["train", *recipe_of(setting.kind, folder, base), *setting.settings]
        self.faults: list[str] = []
        self.log: list[str] = []
        """The victims, in order."""
        self._seen: set[int] = set()

    @property
    def lock(self) -> Path:
        return self.folder / "run" / ".lock"

    def disturb(self, seconds: float, most: int) -> int:
        """Kill it at random moments, `most` times or until it is done; how often it was killed."""
        process = self._start()
        while len(self.log) < most:
            end = time.monotonic() + self.rng.uniform(0.0, SPAN * seconds)
            while time.monotonic() < end and process.poll() is None:
                time.sleep(POLL)
            if process.poll() is not None:
                if process.poll() != 0 and self._stopped_by(process):
                    process = self._start()
                    continue
                break
            victim = self.rng.choice(self.setting.victims)
            pids = victim(process.pid)
            self._seen.update(everything(process.pid))
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if pids:
                name = getattr(victim, "__name__", "")
                self.log.append("an actor" if name == "find" else name.replace("_", " "))
            if process.pid in pids or self.setting.start is torchrun_process:
                self._wait(process)
                if len(self.log) < most:
                    process = self._start()
        self._wait(process)
        return len(self.log)

    def finish(self) -> float:
        """Run it to its end; the seconds that this took."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            process = self._start()
            started = time.monotonic()
            self._wait(process)
            if process.poll() == 0:
                return time.monotonic() - started
            text = process.output()
            if HELD not in text:
                self.faults.append(f"does not finish ({process.poll()}): {text[-600:]}")
                return time.monotonic() - started
            time.sleep(1.0)
        self.faults.append("the folder was never released")
        return PATIENCE

    def compare(self, whole: Killed) -> Comparison:
        found = compare(self.folder / "run", whole.folder / "run", self.setting.is_timed)
        found.faults += self.faults
        left = [pid for pid in self._seen if str(self.folder) in command_line(pid)]
        found.faults += [f"process {pid} still runs: {command_line(pid)}" for pid in left]
        return found

    def _start(self) -> Running:
        """Start it, and wait until it owns its folder."""
        known = self.lock.stat().st_mtime_ns if self.lock.exists() else 0
        process = self.setting.start(self.arguments)
        until = time.monotonic() + PATIENCE
        while process.poll() is None and time.monotonic() < until:
            if self.lock.exists() and self.lock.stat().st_mtime_ns != known:
                break
            time.sleep(POLL)
        return process

    def _stopped_by(self, process: Running) -> bool:
        """Whether it ended because of an earlier kill: nothing but a lock that was still held."""
        text = process.output()
        if HELD in text:
            time.sleep(1.0)
            return True
        self.faults.append(f"ended with {process.poll()}: {text[-600:]}")
        return False

    def _wait(self, process: Running) -> None:
        until = time.monotonic() + PATIENCE
        while process.poll() is None and time.monotonic() < until:
            time.sleep(POLL)
        if process.poll() is None:
            self.faults.append(f"still ran after {PATIENCE:g} s")
            for pid in everything(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return [
            int(number)
            for thread in Path(f"/proc/{pid}/task").iterdir()
            for number in (thread / "children").read_text().split()
        ]
    return []


def descendants(pid: int) -> list[int]:
    return [one for child in children(pid) for one in (child, *descendants(child))]


def command_line(pid: int) -> str:
    with suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode("utf-8", "replace")
        )
    return ""
