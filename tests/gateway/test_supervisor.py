"""No process that an agent's program starts outlives its attempt, wherever it goes."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from graft.gateway import supervisor
from graft.gateway.process import run_process
from graft.gateway.supervisor import descendants

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
DAEMONS = {
    "in the background": "sleep 60 &",
    "another session": "setsid sleep 60 &",
    "without an environment": "setsid env -i sleep 60 &",
    "of a daemon": "(setsid env -i sh -c 'sleep 60 & sleep 60' &) &",
    "ignores signals": "(trap '' HUP TERM INT; setsid env -i sleep 60 &) ;",
    "closes its files": "setsid env -i sh -c 'exec <&- >&- 2>&-; sleep 60' &",
}
MARK = f"60.{os.getpid()}"
"""Seconds that the sleeps of these tests take: by this they are found."""


def num_running() -> int:
    count = 0
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
            state = (file.parent / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        count += words[:2] == [b"sleep", MARK.encode()] and state != "Z"
    return count


def run_script(script: str, seconds: float = 20.0) -> int:
    async def main() -> int:
        command = ["sh", "-c", script.replace("sleep 60", f"sleep {MARK}")]
        try:
            async with asyncio.timeout(seconds):
                return (await run_process(lambda folder: command, {}, {})).code
        except TimeoutError:
            return -1

    return asyncio.run(main())


@pytest.mark.parametrize("has_cgroup", [True, False])
@pytest.mark.parametrize("script", DAEMONS.values(), ids=DAEMONS)
def test_daemons_end_with_their_program(
    script: str, has_cgroup: bool, monkeypatch: pytest.MonkeyPatch
):
    if not has_cgroup:
        monkeypatch.setattr(supervisor, "make_cgroup", lambda name: "")
    assert run_script(f"{script} sleep 0.1; exit 3") == 3
    assert num_running() == 0
    assert not (parent := supervisor.cgroup_parent()) or not [*parent.glob("graft-agent-*")]


def test_daemons_end_at_the_deadline_of_the_program():
    assert run_script(f"{DAEMONS['without an environment']} sleep 60", seconds=0.5) == -1
    assert num_running() == 0


def test_a_control_group_ends_the_daemons_of_a_program_that_kills_its_supervisor():
    if not (made := supervisor.make_cgroup("graft-test")):
        pytest.skip("no control group of version 2 can be made here")
    supervisor.remove_cgroup(made)
    assert not Path(made).exists()
    run_script(f"{DAEMONS['without an environment']} kill -9 $PPID; sleep 60")
    time.sleep(0.1)
    assert num_running() == 0


def test_a_program_ends_as_it_ended():
    assert run_script("kill -9 $$") == -9
    assert run_script("kill -15 $$") == -15
    assert run_script("exit 0") == 0


def test_descendants_are_children_and_theirs():
    async def main() -> list[int]:
        script = "import subprocess, time; subprocess.Popen(['sleep', '5']); time.sleep(5)"
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
        until = time.monotonic() + 10
        while len(found := descendants(process.pid)) < 1 and time.monotonic() < until:
            await asyncio.sleep(0.02)
        assert process.pid in descendants(os.getpid()) and found[0] in descendants(os.getpid())
        os.kill(found[0], 9)
        process.kill()
        await process.wait()
        return found

    assert len(asyncio.run(main())) == 1
