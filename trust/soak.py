"""A day's worth of steps: asynchronous, with tools that are slow, fail, crash, hang and refuse.

The clock of the run is simulated: `RATE` of its seconds pass in one real second, for tools, deadlines and
the event loop. At every step the process notes its memory, open files, threads and the size of its folder;
after a warm-up they must be flat, and what the folder grows by per step must be constant. Every failure of a
tool must be a status of its attempt: the run ends with all of its steps.
"""

from __future__ import annotations

import json
import os
import random
import selectors
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from graft.envs.base import BaseEnv
from graft.tools.calling import call_tool
from graft.tools.errors import ToolError
from graft.types import Turn
from tests.command_line import python
from trust.bank import Row
from trust.tiny_runs import RECIPE, new_place

SMALL = 60
"""Steps of one run."""
FULL = 2_000
RATE = 150
"""2,000 steps take some ten minutes of a CPU: a day of the simulated clock."""
WARM_UP = 0.3
"""Share of the steps before the first measurement that counts."""
JUDGED = 600
"""Steps from which on growth is a failure: in shorter runs threads for tool calls are still being added, up
to the most calls that ever ran at once."""
ALLOWED = {"memory, MB": 0.05, "open files": 0.0, "threads": 0.0, "disk per step, KB": 0.1}
"""Share by which the last steps may exceed the first ones after the warm-up."""
SLACK = {"memory, MB": 8.0, "open files": 2.0, "threads": 4.0, "disk per step, KB": 1.0}
"""And this much, in any case: threads of tools that hang end at different moments."""
DEADLINE = 300
METER = "soak.jsonl"
SETTINGS = [
    "task.env=trust.soak:Unreliable", "task.reward=null", "task.eval_args={}", "algo.name=grpo",
    "rollout.staleness=2", "rollout.max_turns=2", "run.save_later=true", "run.save_every=25",
    "run.eval_every=50", "rollout.tasks=4", f"rollout.deadline={DEADLINE}", "run.trackers=[trust.soak:Meter]",
]  # fmt: skip
CODE = """
import sys
from tests.training import train_recipe
from trust.soak import simulate_clock
simulate_clock()
train_recipe(*sys.argv[1:])
"""


def simulate_clock(rate: float = RATE) -> None:
    """Let `rate` seconds pass in one, for the deadlines of this process: its clock and event loops."""
    real_time, start = time.monotonic, time.monotonic()
    select = selectors.DefaultSelector.select

    def faster_select(self: Any, timeout: Any = None) -> Any:
        return select(self, timeout if timeout is None else timeout / rate)

    time.monotonic = lambda: start + (real_time() - start) * rate
    selectors.DefaultSelector.select = faster_select


class Tool:
    """A tool that does what it is told: one in three calls goes wrong."""

    name, description, parameters = "unreliable", "Does anything.", {}

    def __call__(self, content: str) -> str:
        kind, _, number = content.partition(" ")
        if kind == "slow":
            time.sleep(30.0 / RATE)
        elif kind == "hangs":
            time.sleep(2 * DEADLINE / RATE)
        elif kind == "fails":
            raise ToolError(f"service {number} is down")
        elif kind == "raises":
            raise ValueError(f"row {number} is not a row")
        elif kind == "crashes":
            subprocess.run(["/bin/false"], check=True)
        elif kind == "exits":
            raise SystemExit(3)
        elif kind == "refuses":
            return "Error: no such row"
        return f"{number}."


KINDS = {
    "works": 70,
    "slow": 8,
    "refuses": 8,
    "fails": 5,
    "raises": 5,
    "crashes": 1,
    "exits": 2,
    "hangs": 1,
}
"""What a call does, and how often of 100."""


class Unreliable(BaseEnv):
    """Any two texts; each is answered by the tool, and pays for its low characters."""

    alphabet = "0123456789+-=."
    blocking = True

    def pose(self) -> str:
        return f"{self.rng.randrange(100)}="

    def respond(self, action: str) -> Turn:
        own = random.Random()  # not the task's: its attempts would all fail together
        kind = own.choices([*KINDS], [*KINDS.values()])[0]
        text = call_tool(Tool(), f"{kind} {own.randrange(10**6)}")
        reward = sum(letter < "5" for letter in action) / max(1, len(action))
        is_error = text.startswith("Error")
        return Turn(text[:4] if not is_error else "-", reward, terminated=own.random() < 0.8)


class Meter:
    """A tracker that notes what the process holds after each step."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder

    def log(self, step: int, metrics: Mapping[str, float], phase: str) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        kept = [path for path in self.folder.rglob("*") if "checkpoints" not in path.parts]
        row = {
            "step": step,
            "clock": time.monotonic(),
            "memory, MB": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
            "open files": len([*Path("/proc/self/fd").iterdir()]),
            "threads": len([*Path("/proc/self/task").iterdir()]),
            "disk, KB": sum(path.stat().st_size for path in kept if path.is_file()) / 1e3,
        }
        with (self.folder.parent / METER).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def truncate_after(self, phase: str, step: int) -> None: ...
    def close(self) -> None: ...


def run(count: int, seed: int) -> Iterator[Row]:
    """One run of `count` steps."""
    with new_place("soak") as name:
        folder = Path(name)
        recipe = folder / "recipe.yaml"
        recipe.write_text(RECIPE.format(folder=folder), encoding="utf-8")
        settings = [*SETTINGS, f"train.steps={count}", f"run.seed={seed}"]
        done = python(CODE, str(recipe), *settings, timeout=3600.0)
        failures = (
            [f"ended with {done.returncode}: {done.stderr[-500:]}"] if done.returncode else []
        )
        rows = _read(folder / METER)
        statuses = _statuses(folder / "run")
        failures += [] if len(rows) == count else [f"{len(rows)} of {count} steps"]
        missing = {"done", "tool_error", "timeout"} - set(statuses) if count >= 500 else set()
        failures += [f"no attempt ended with {status}" for status in sorted(missing)]
        measured: dict[str, float | int | str] = {}
        if len(rows) > 20:
            hours = (rows[-1]["clock"] - rows[0]["clock"]) / 3600
            measured["hours of the simulated clock"] = round(hours, 1)
            growth = [text for name in ALLOWED for text in _flat(name, rows, measured)]
            failures += growth if count >= JUDGED else []
        measured |= {f"attempts {status}": number for status, number in sorted(statuses.items())}
        yield Row("soak", "async, unreliable tools", count, failures, measured)


def _flat(name: str, rows: Sequence[Mapping[str, float]], measured: dict[str, Any]) -> list[str]:
    """Whether the last tenth of a row of numbers is as high as the tenth after the warm-up."""
    if name == "disk per step, KB":
        values = [b["disk, KB"] - a["disk, KB"] for a, b in pairwise(rows)]
    else:
        values = [row[name] for row in rows]
    values = values[int(WARM_UP * len(values)) :]
    tenth = max(5, len(values) // 10)
    centre = statistics.fmean if name.startswith("disk") else statistics.median
    first, last = centre(values[:tenth]), centre(values[-tenth:])
    slope = statistics.linear_regression(range(len(values)), values).slope
    measured[name] = f"{first:.1f} to {last:.1f} ({1000 * slope:+.2f} per 1,000 steps)"
    is_flat = last <= first * (1 + ALLOWED[name]) + SLACK[name]
    return [] if is_flat else [f"{name} grew from {first:.1f} to {last:.1f}"]


def _read(path: Path) -> list[dict[str, float]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _statuses(run: Path) -> Counter[str]:
    files = run.glob("episodes/*.jsonl")
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return Counter(leaf["status"] for line in lines for leaf in json.loads(line)["leaves"])
