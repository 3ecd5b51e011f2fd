"""Programs of agents that leave processes behind: none may outlive its attempt."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

from graft.gateway import supervisor
from graft.gateway.process import run_process
from trust.bank import Row

SMALL, FULL = 18, 500
MARK = f"300.{os.getpid()}"
"""Seconds that a daemon sleeps: by this it is found."""
DAEMONS = [
    f"sleep {MARK} &",
    f"setsid sleep {MARK} &",
    f"setsid env -i sleep {MARK} &",
    f"(setsid env -i sh -c 'sleep {MARK} & sleep {MARK}' &) &",
    f"(trap '' HUP TERM INT; setsid env -i sleep {MARK} &) ;",
    f"setsid env -i sh -c 'exec <&- >&- 2>&-; sleep {MARK}' &",
    f"nohup setsid env -i sh -c 'cd /; umask 0; (sleep {MARK} &) ; sleep {MARK}' >/dev/null 2>&1 &",
    f"for i in 1 2 3 4 5; do setsid env -i sleep {MARK} & done;",
    f"setsid env -i sh -c 'while true; do (setsid sleep {MARK} &); sleep 0.05; done' &",
]
ENDS = ["exit 0", "exit 3", "kill -9 $$", "kill -15 $$", f"sleep {MARK}"]


def run(count: int, seed: int) -> Iterator[Row]:
    draw = random.Random(seed)
    can_group = bool(made := supervisor.make_cgroup("graft-trust"))
    supervisor.remove_cgroup(made)
    for has_group in (True, False) if can_group else (False,):
        row = Row("daemons", "control group" if has_group else "subreaper", count)
        make = supervisor.make_cgroup
        supervisor.make_cgroup = make if has_group else lambda name: ""
        try:
            for number in range(count):
                script = f"{DAEMONS[number % len(DAEMONS)]} sleep 0.05; {draw.choice(ENDS)}"
                asyncio.run(_attempt(script))
                time.sleep(0.02)
                if left := sleeping():
                    row.failures.append(f"{len(left)} left by {script}")
                    for pid in left:
                        os.kill(pid, 9)
        finally:
            supervisor.make_cgroup = make
        yield row


async def _attempt(script: str) -> None:
    try:
        async with asyncio.timeout(1.0):
            await run_process(lambda folder: ["sh", "-c", script], {}, {})
    except TimeoutError:
        pass


def sleeping() -> list[int]:
    """The daemons that run."""
    found: list[int] = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
            state = (file.parent / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if words[:2] == [b"sleep", MARK.encode()] and state != "Z":
            found.append(int(file.parent.name))
    return found
