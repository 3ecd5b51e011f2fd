"""How busy an evaluation keeps its engine: 1,000 tasks x 8 samples through the code of `graft eval`.

    python -m benchmarks.eval_idle [--tasks 1000] [--samples 8] [--concurrency 32] [--tool-seconds 0]
                                   [--device cpu] [--json]

The quickstart's model with random weights on the quickstart's task; every attempt is stored as the
command stores it. Reported are

    idle        share of the time in which not one request was under way while tasks were left
    under way   requests that the engine had at a time, on average, of at most concurrency x samples
    computing   share of the time in which the engine computed (the rest is Python: environments, files)

`--tool-seconds` makes every answer of the environment take that long, on a thread, as a search does.
Exits with 1 where the idle share is 5% or more.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from graft.config import load_config
from graft.envs import make
from graft.envs.base import Wrapper
from graft.evaluate.attempts import make_attempts
from graft.evaluate.samples import SampleFile, StoredSample
from graft.protocols import Context
from graft.train.build import build_run
from graft.train.tasks import held_out_tasks
from graft.types import Completion, Sampling, Task, Turn

MAX_IDLE = 0.05


class Watch:
    """Counts requests under way; adds up the time without one, and the time with each number."""

    def __init__(self) -> None:
        self.under_way = self.requests = 0
        self.idle = self.weighted = 0.0
        self.started = self.last = time.perf_counter()

    def change(self, by: int) -> None:
        now = time.perf_counter()
        self.weighted += (now - self.last) * self.under_way
        self.idle += (now - self.last) * (not self.under_way)
        self.last, self.under_way = now, self.under_way + by
        self.requests += by > 0


class WatchedContext:
    """A context whose samples are counted while they are awaited."""

    def __init__(self, context: Any, watch: Watch) -> None:
        self.context, self.watch = context, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.context, name)

    def fork(self, key: int | None = None, at: int | None = None) -> WatchedContext:
        return WatchedContext(self.context.fork(key, at), self.watch)

    async def sample(self, sampling: Sampling, grammar: Any = None) -> Completion:
        self.watch.change(+1)
        try:
            return await self.context.sample(sampling, grammar)
        finally:
            self.watch.change(-1)


class WatchedEngine:
    """An engine that opens watched contexts."""

    def __init__(self, engine: Any, watch: Watch) -> None:
        self.engine, self.watch = engine, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def open(self, tokens: Any, key: int | None = None) -> Context:
        context: Any = WatchedContext(self.engine.open(tokens, key), self.watch)
        return context


class Slow(Wrapper):
    """An environment whose answers take their time."""

    def __init__(self, env: Any, seconds: float) -> None:
        super().__init__(env)
        self.blocking, self.seconds = True, seconds

    def step(self, action: str) -> Turn:
        time.sleep(self.seconds)
        return self.env.step(action)


def measure(
    tasks: int,
    samples: int,
    concurrency: int,
    tool_seconds: float = 0.0,
    device: str = "auto",
    overrides: tuple[str, ...] = (),
) -> dict[str, Any]:
    """One evaluation, watched."""
    config = load_config("quickstart", [f"model.device={device}", *overrides])
    components = build_run(config)
    watch = Watch()
    computing = _watch_steps(components.engine)
    engine: Any = WatchedEngine(components.engine, watch)

    def env(task: Task) -> Any:
        made = make("calculator", split="test")
        return Slow(made, tool_seconds) if tool_seconds else made

    setup = replace(components.held_out, engine=engine, make_env=env)
    left = tasks * samples
    ended = 0.0
    with tempfile.TemporaryDirectory() as folder:
        file = SampleFile(Path(folder) / "samples.jsonl", {})

        def keep(sample: StoredSample) -> None:
            nonlocal left, ended
            file.append(sample)
            left -= 1
            ended = time.perf_counter()

        todo = [(task, range(samples)) for task in held_out_tasks("calculator", tasks)]
        watch.started = watch.last = time.perf_counter()
        make_attempts(todo, setup, keep, at_a_time=concurrency * samples)
        watch.change(0)
        file.close()
    wall = ended - watch.started
    components.engine.close()
    assert not left, f"{left} attempts are missing"
    return {
        "tasks": tasks,
        "samples": samples,
        "concurrency": concurrency,
        "tool_seconds": tool_seconds,
        "device": str(components.policy.device),
        "seconds": round(wall, 2),
        "attempts_per_second": round(tasks * samples / wall, 1),
        "requests": watch.requests,
        "idle": round(watch.idle / wall, 4),
        "under_way": round(watch.weighted / wall, 1),
        "computing": round(computing[0] / wall, 3),
    }


def _watch_steps(engine: Any) -> list[float]:
    """Adds up, in the one entry of the list, the time inside the engine's own steps."""
    spent, runner = [0.0], engine._loop.runner
    run = runner.run

    def watched(*arguments: Any) -> Iterator[Any]:
        steps = run(*arguments)
        while True:
            started = time.perf_counter()
            draws = next(steps, None)
            spent[0] += time.perf_counter() - started
            if draws is None:
                return
            yield draws

    runner.run = watched
    return spent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=32, help="tasks at a time")
    parser.add_argument("--tool-seconds", type=float, default=0.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = measure(given.tasks, given.samples, given.concurrency, given.tool_seconds, given.device)
    if given.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name:20} {value}" for name, value in found.items()))
    return int(found["idle"] >= MAX_IDLE)


if __name__ == "__main__":
    sys.exit(main())
