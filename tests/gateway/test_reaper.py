"""Agents do not outlive a run that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUN = """
import resource, subprocess, sys
from graft.gateway.reaper import new_mark, reaper
def start(mark):
    process = subprocess.Popen(["sleep", "60"], env={}, start_new_session=True)
    resource.prlimit(process.pid, resource.RLIMIT_RTTIME, (mark, mark))
    return process.pid
first, second = new_mark(), new_mark()
ended, agent, child = start(first), start(second), start(second)
reaper().watch(ended, first, "/no/such/folder")
reaper().watch(agent, second, sys.argv[1])
reaper().forget(ended)
print(ended, agent, child, reaper()._process.pid, flush=True)
sys.stdin.read()
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
@pytest.mark.parametrize("how", ["killed", "ended"])
def test_agents_that_still_run_are_killed_with_their_children_and_their_folder(
    tmp_path: Path, how: str
):
    folder = tmp_path / "of agent b"
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None and run.stdin is not None
        ended, agent, child, reaper = map(int, run.stdout.readline().split())
        assert all(map(is_running, (ended, agent, child, reaper)))
        run.kill() if how == "killed" else run.stdin.close()
        run.wait(20)
    until = time.monotonic() + 20
    while any(map(is_running, (agent, child, reaper))) or folder.exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    assert is_running(ended)  # it was forgotten: the run has ended it itself
    os.kill(ended, signal.SIGKILL)
