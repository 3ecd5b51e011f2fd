"""Commands that need each other's results: each begins when those before it are done, all end in time."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

POLL = 0.25
GRACE = 5.0
"""Seconds that a stopped process has to save what it has reached."""
STOPPED = 130
"""Exit code of a run that was stopped and has saved its state."""


class Job(NamedTuple):
    name: str
    command: Callable[[], list[str]]
    """Called when the job begins: what it is may depend on the results of others."""
    after: tuple[str, ...] = ()
    until: float = float("inf")
    """Second at which it is stopped; those that need it begin with what it has reached."""


def run_jobs(
    jobs: list[Job], logs: Path, seconds: float, most: int, look: Callable[[float], None]
) -> None:
    """At most `most` at a time; output to `logs`; after `seconds` all are stopped.

    `look` is called with the time several times a second, to report what the jobs have written.
    """
    began, waiting, done = time.monotonic(), list(jobs), set[str]()
    running = dict[Job, subprocess.Popen[bytes]]()
    stopped = set[Job]()
    while (now := time.monotonic() - began) < seconds:
        for job in [one for one in waiting if done.issuperset(one.after)][: most - len(running)]:
            waiting.remove(job)
            with (logs / f"{job.name}.log").open("wb") as log:
                running[job] = subprocess.Popen(job.command(), stdout=log, stderr=log)
            print(f"{now:4.0f} s  {job.name} begins", flush=True)
        late = {job for job in running if now > job.until} - stopped
        for job in late:
            running[job].send_signal(signal.SIGTERM)
        stopped |= late
        for job, process in list(running.items()):
            if (code := process.poll()) is not None:
                del running[job]
                done |= {job.name} if code in (0, STOPPED) else set()
                print(
                    f"{now:4.0f} s  {job.name} {_end(code, logs / f'{job.name}.log')}", flush=True
                )
        look(now)
        if not running and not any(done.issuperset(job.after) for job in waiting):
            return
        time.sleep(POLL)
    stop(list(running.values()))
    look(time.monotonic() - began)


def _end(code: int, log: Path) -> str:
    if code in (0, STOPPED):
        return "is done" if code == 0 else "was stopped"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return f"failed ({code}): {' | '.join(lines[-3:])[-600:]}"


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """As Ctrl-C does; what does not end within `GRACE` is killed."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    until = time.monotonic() + GRACE
    for process in processes:
        try:
            process.wait(max(until - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
