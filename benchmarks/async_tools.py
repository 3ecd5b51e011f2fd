"""Slow tools: sampling and learning in turns against sampling up to two steps ahead.

    make bench BENCH=async_tools ARGS="5 1 0.1 0"      # rounds, then seconds that a call takes; --record

A model as large as the quickstart's learns to use the calculator, whose calls take a set time.
It is warmed up once, so that attempts do call it; then every round trains it from there with
rollout.staleness 0 and with 2, one right after the other, so that both see the same machine. Of each
run the first steps (which fill the window) and the last (which no longer share the machine with steps
ahead) are left out.

    in turns     sample, wait for tools | learn | sample, wait for tools | learn
    ahead        learn | learn | learn          while the attempts of the next two steps wait for tools

Reported are medians over the rounds: steps and sampled tokens per second; the share of the time in which
nothing is learned, and that in which the engine computes nothing; and how old tokens are when they are
learned from. What is learned, and how well, is not compared here: stale tokens are weighed, and worth
a little less.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# threads that sleep while they wait, as the command line has it
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from benchmarks.record import Figure, record, slug, take_flag
from graft.config import Config, check
from graft.engine.native.cpu.runner import CpuRunner
from graft.envs.calculator import CalculatorTask
from graft.train.monitor.display import Display
from graft.train.rollouts.collected_rollouts import CollectedRollouts
from graft.train.run_dir.checkpoint import checkpoints
from graft.train.session import Session
from graft.types import Turn

AHEAD = 2
STEPS = 11
FIRST, LAST = 3, STEPS - AHEAD
"""Steps that are timed: from the third to the last one that has steps ahead of it."""


class SlowCalculator(CalculatorTask):
    """The calculator, each call of which takes `delay` seconds on a thread of its own."""

    def __init__(self, *, delay: float = 0.0, **given) -> None:
        super().__init__(**given)
        self.delay = delay
        self.blocking = delay > 0

    def step(self, action: str) -> Turn:
        turn = super().step(action)
        if "tool" in turn.info:
            time.sleep(self.delay)
        return turn


@dataclass(frozen=True, slots=True)
class Measured:
    """One run."""

    steps_per_second: float
    tokens_per_second: float
    learner_idle: float
    engine_idle: float
    rollout: float
    """Seconds of a step that the learner waits for episodes."""
    learn: float
    calls: float
    """Tool calls of an attempt."""
    age: float


def recipe(folder: Path, delay: float, staleness: int, model: str, steps: int, sft: int) -> Config:
    return check(
        {
            "run": {
                "dir": str(folder),
                "name": "run",
                "save_every": 0,
                "eval_tasks": 0,
                "trackers": [],
                "log_episodes": 0,
            },
            "model": {"path": model}
            if model
            else {
                "shape": {
                    "width": 192,
                    "layers": 3,
                    "heads": 6,
                    "kv_heads": 6,
                    "head_dim": 32,
                    "ff": 384,
                    "tied": False,
                    "rope_theta": 100.0,
                    "max_positions": 128,
                }
            },
            "task": {"env": "benchmarks.async_tools:SlowCalculator", "args": {"delay": delay}},
            "rollout": {
                "tasks": 48,
                "samples": 8,
                "max_tokens": 24,
                "max_turns": 6,
                "max_context": 96,
                "staleness": staleness,
            },
            "algo": {"name": "grpo", "reduction": "token"},
            "train": {"steps": steps, "lr": 2.0e-4},
            "sft": {
                "steps": sft,
                "batch": 32,
                "lr": 3.0e-3,
                "warmup": 10,
                "demo_args": {"tool_rate": 1.0},
            },
        }
    )


def train(config: Config) -> list[dict]:
    with Display(config.train.steps, quiet=True) as display:
        Session(config, display).train()
    lines = (Path(config.run.dir) / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    return [line for line in map(json.loads, lines) if line["phase"] == "rl"]


@contextmanager
def watched() -> Iterator[tuple[list[float], list[tuple[float, float]]]]:
    """When each step's episodes were taken, and when the engine computed."""
    taken: list[float] = []
    computed: list[tuple[float, float]] = []
    take, step = CollectedRollouts.take, CpuRunner._step

    def timed_take(self: CollectedRollouts, number: int):
        taken.append(time.perf_counter())
        return take(self, number)

    def timed_step(self: CpuRunner, works):
        started = time.perf_counter()
        draws = step(self, works)
        computed.append((started, time.perf_counter()))
        return draws

    CollectedRollouts.take, CpuRunner._step = timed_take, timed_step
    try:
        yield taken, computed
    finally:
        CollectedRollouts.take, CpuRunner._step = take, step


def measure(model: str, delay: float, staleness: int) -> Measured:
    with tempfile.TemporaryDirectory() as folder, watched() as (taken, computed):
        lines = train(recipe(Path(folder), delay, staleness, model, STEPS, sft=0))
    timed = lines[FIRST - 1 : LAST]
    begin, end = taken[FIRST - 1], taken[LAST]
    seconds = end - begin
    busy = sum(max(0.0, min(b, end) - max(a, begin)) for a, b in computed)

    def mean(name: str) -> float:
        return statistics.fmean(line[name] for line in timed)

    return Measured(
        steps_per_second=len(timed) / seconds,
        tokens_per_second=sum(line["num_tokens"] for line in timed) / seconds,
        learner_idle=1 - sum(line["time/learn"] for line in timed) / seconds,
        engine_idle=1 - busy / seconds,
        rollout=mean("time/rollout"),
        learn=mean("time/learn"),
        calls=mean("tools/call_frequency"),
        age=mean("staleness/mean"),
    )


def main(rounds: int, delays: list[float], *, keep: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        train(recipe(Path(folder), 0.0, 0, "", steps=1, sft=120))
        model = str(checkpoints(Path(folder) / "run" / "checkpoints")[-1].path)
        print(f"warmed up in {time.perf_counter() - started:.0f} s", flush=True)
        table: list[str] = []
        figures: list[Figure] = []
        for delay in delays:
            found: dict[int, list[Measured]] = {0: [], AHEAD: []}
            for number in range(rounds):
                for staleness, runs in found.items():
                    runs.append(measure(model, delay, staleness))
                    load = os.getloadavg()[0]
                    print(
                        f"{delay:g} s, round {number + 1}, {runs[-1]}, load {load:.1f}", flush=True
                    )
            table += rows(delay, found)
            figures += figures_of(delay, found)
    print(
        "\n| a call takes | staleness | steps/s | tokens/s | a step waits | and learns | learner idle "
        "| engine idle | mean age | times as fast |\n|" + " --- |" * 10
    )
    print("\n".join(table))
    if keep:
        record(figures)


def figures_of(delay: float, found: dict[int, list[Measured]]) -> list[Figure]:
    kept: list[Figure] = []
    for staleness, runs in found.items():
        what = f"staleness {staleness}, a call takes {delay:g} s"
        rates = tuple(each.tokens_per_second for each in runs)
        idle = statistics.median(each.learner_idle for each in runs)
        note = f"the learner is idle for {idle:.0%} of the time"
        kept.append(
            Figure(f"async.{slug(what)}", what, statistics.median(rates), "tok/s", rates, note)
        )
    return kept


def rows(delay: float, found: dict[int, list[Measured]]) -> list[str]:
    """One line of the table for each staleness; the ratio is the median of the rounds' own ratios."""
    pairs = zip(found[0], found[AHEAD], strict=True)
    ratio = statistics.median(b.steps_per_second / a.steps_per_second for a, b in pairs)
    lines: list[str] = []
    for staleness, runs in found.items():

        def median(name: str, runs: list[Measured] = runs) -> float:
            return statistics.median(getattr(one, name) for one in runs)

        lines.append(
            f"| {delay:g} s | {staleness} | {median('steps_per_second'):.3f} "
            f"| {median('tokens_per_second'):.0f} | {median('rollout'):.2f} s "
            f"| {median('learn'):.2f} s | {median('learner_idle'):.0%} "
            f"| {median('engine_idle'):.0%} | {median('age'):.2f} "
            f"| {f'{ratio:.2f}' if staleness else ''} |"
        )
    return lines


if __name__ == "__main__":
    given, keep = take_flag(sys.argv[1:])
    delays = [float(delay) for delay in given[1:]]
    main(int(given[0]) if given else 5, delays or [1.0, 0.1, 0.0], keep=keep)
