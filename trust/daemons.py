"""Programs of agents that leave processes behind: none may outlive its attempt."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

from graft.gateway import supervision
from graft.gateway.process import run_process
from graft.gateway.supervisor import CGROUP
from trust.bank import Row

SMALL, FULL = 24, 500
MARK = f"300.{os.getpid()}"
"""Seconds that a daemon sleeps: by this it is found."""
DAEMONS = {
    "in the background": f"sleep {MARK} &",
    "another session": f"setsid sleep {MARK} &",
    "without an environment": f"setsid env -i sleep {MARK} &",
    "of a daemon": f"(setsid env -i sh -c 'sleep {MARK} & sleep {MARK}' &) &",
    "ignores signals": f"(trap '' HUP TERM INT; setsid env -i sleep {MARK} &) ;",
    "closes its files": f"setsid env -i sh -c 'exec <&- >&- 2>&-; sleep {MARK}' &",
    "forks twice": f"nohup setsid env -i sh -c 'cd /; (sleep {MARK} &) ; sleep {MARK}' >/dev/null 2>&1 &",
    "five of them": f"for i in 1 2 3 4 5; do setsid env -i sleep {MARK} & done;",
    "starts others": f"setsid env -i sh -c 'while true; do (setsid sleep {MARK} &); sleep 0.05; done' &",
}
ENDS = {
    "ends": "exit 0",
    "fails": "exit 3",
    "kills itself": "kill -9 $$",
    "is terminated": "kill -15 $$",
    "waits": f"sleep {MARK}",
    "kills its parent": f"kill -9 $PPID; sleep {MARK}",
    "terminates its parent": f"kill -15 $PPID; sleep {MARK}",
}


def run(count: int, seed: int) -> Iterator[Row]:
    draw, choose = random.Random(seed), supervision.choose
    for method, reason in supervision.methods().items():
        if reason:
            continue
        row, cases = Row("daemons", method, count), [*scripts(method).items()]
        supervision.choose = lambda method=method: method
        try:
            for name, script in draw.sample(cases * (count // len(cases) + 1), count):
                run_script(script)
                time.sleep(0.02)
                if pids := sleeping():
                    row.failures.append(f"{len(pids)} of a daemon {name}")
                for pid in pids:
                    os.kill(pid, 9)
        finally:
            supervision.choose = choose
        yield row


def scripts(method: str) -> dict[str, str]:
    """Every daemon with every end of its program, by their names; also outside of the control group."""
    leave = {"": ""}
    if method == CGROUP:
        leave["; it left its group"] = f"echo $$ > {supervision.cgroup_parent()}/cgroup.procs; "
    return {
        f"{daemon}, its program {end}{place}": f"{first}{DAEMONS[daemon]} sleep 0.05; {ENDS[end]}"
        for daemon in DAEMONS
        for end in ENDS
        for place, first in leave.items()
    }


def run_script(script: str, seconds: float = 1.0) -> int:
    """Run a program of an agent; its exit code, -1 if the time is over."""

    async def main() -> int:
        async with asyncio.timeout(seconds):
            return (await run_process(lambda folder: ["sh", "-c", script], {}, {})).code

    try:
        return asyncio.run(main())
    except TimeoutError:
        return -1


def sleeping() -> list[int]:
    """The daemons that run."""
    pids: list[int] = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
            state = (file.parent / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if words[:2] == [b"sleep", MARK.encode()] and state != "Z":
            pids.append(int(file.parent.name))
    return pids
