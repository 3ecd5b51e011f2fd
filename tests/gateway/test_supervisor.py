"""No process that an agent's program starts outlives its attempt, wherever it goes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from graft.gateway import supervision
from graft.gateway.process import run_process
from graft.gateway.reaper import MAX_MARK, marked, new_mark
from graft.gateway.supervisor import CGROUP, NAMESPACE, SUBREAPER, descendants
from trust.daemons import DAEMONS, ENDS, MARK, run_script, sleeping

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@pytest.fixture(params=[CGROUP, NAMESPACE, SUBREAPER])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if reason := supervision.methods()[request.param]:
        pytest.skip(f"no {request.param} here: {reason}")
    monkeypatch.setattr(supervision, "choose", lambda: request.param)
    return request.param


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def output_of(*words: str) -> str:
    """What a program writes."""
    return asyncio.run(run_process(lambda folder: words, {}, {})).output


@pytest.mark.parametrize("name", DAEMONS)
def test_daemons_end_with_their_program(name: str, method: str):
    assert run_script(f"{DAEMONS[name]} sleep 0.1; exit 3", seconds=20) == 3
    assert sleeping() == []
    assert not (parent := supervision.cgroup_parent()) or not [
        *parent.glob(f"graft-agent-{os.getpid()}-*")
    ]


def test_daemons_end_at_the_deadline_of_the_program(method: str):
    script = f"{DAEMONS['without an environment']} {ENDS['waits']}"
    assert run_script(script, seconds=0.7) == -1
    assert sleeping() == []


@pytest.mark.parametrize("signal", [9, 15])
def test_daemons_of_a_program_that_kills_its_supervisor_end(signal: int, method: str):
    script = f"{DAEMONS['forks twice']} {DAEMONS['without an environment']} sleep 0.1; kill -{signal} $PPID; "
    run_script(script + ENDS["waits"], seconds=2)
    assert sleeping() == []


@pytest.mark.parametrize("method", [CGROUP], indirect=True)
def test_a_program_that_left_its_control_group_and_killed_its_supervisor_leaves_nothing(
    method: str,
):
    leave = f"echo $$ > {supervision.cgroup_parent()}/cgroup.procs; "
    run_script(leave + DAEMONS["without an environment"] + ENDS["kills its parent"], seconds=2)
    assert sleeping() == []


def test_a_program_ends_as_it_ended(method: str):
    assert run_script("kill -9 $$", seconds=20) == -9
    assert run_script("kill -15 $$", seconds=20) == -15
    assert run_script("exit 0", seconds=20) == 0


def test_a_program_that_is_not_there_says_so(method: str):
    ended = asyncio.run(run_process(lambda folder: ["no-such-program"], {}, {}))
    assert ended.code == 127 and "no-such-program" in ended.output


def test_a_program_is_the_same_user_and_reads_and_writes_the_same_files(
    method: str, tmp_path: Path
):
    (tmp_path / "read").write_text("6 * 7\n")
    script = f"cd {tmp_path}; id -u; id -g; cat read; cp read written; readlink /proc/self/ns/net"
    network = Path("/proc/self/ns/net").readlink()
    assert output_of("sh", "-c", script) == f"{os.getuid()}\n{os.getgid()}\n6 * 7\n{network}\n"
    assert (tmp_path / "written").stat().st_uid == os.getuid()


def test_a_program_finds_itself_by_its_number(method: str):
    script = "import os; print(open(f'/proc/{os.getpid()}/cmdline').read().split('\\0')[-2])"
    assert output_of(sys.executable, "-c", script, "the last word").strip() == "the last word"


@pytest.mark.parametrize("method", [NAMESPACE], indirect=True)
def test_a_namespace_hides_the_run_and_its_supervisor(method: str):
    script = "echo $$ $PPID; kill -9 -1 2>/dev/null; kill -9 1; echo on"
    assert output_of("sh", "-c", script).split() == ["2", "1", "on"]


@pytest.mark.parametrize("method", [NAMESPACE], indirect=True)
def test_a_namespace_ends_with_its_supervisor(method: str):
    """Also if nobody is left who could end it."""
    script = DAEMONS["without an environment"] + ENDS["waits"]
    with subprocess.Popen(supervision.command(method, "", 0, ["sh", "-c", script])) as supervisor:
        wait_until(lambda: len(sleeping()) == 2)
        supervisor.kill()
    wait_until(lambda: not sleeping())


def test_a_mark_stays_with_processes_that_begin_anew():
    mark = new_mark()
    assert 0 < mark < MAX_MARK and mark != new_mark()
    script = f"setsid env -i sleep {MARK} & sleep 1"
    command = supervision.command(SUBREAPER, "", mark, ["sh", "-c", script])

    with subprocess.Popen(command):
        wait_until(lambda: len({*sleeping()} & {*marked(mark)}) == 1)
    assert marked(mark) == []


def test_the_first_method_that_works_is_chosen(monkeypatch: pytest.MonkeyPatch):
    reasons = {CGROUP: "not here", NAMESPACE: "", SUBREAPER: ""}
    monkeypatch.setattr(supervision, "methods", lambda: reasons)
    assert supervision.choose() == NAMESPACE
    reasons[NAMESPACE] = "not here"
    assert supervision.choose() == SUBREAPER


def test_descendants_are_children_and_theirs():
    async def main() -> list[int]:
        script = "import subprocess, time; subprocess.Popen(['sleep', '5']); time.sleep(5)"
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
        until = time.monotonic() + 10
        while len(pids := descendants(process.pid)) < 1 and time.monotonic() < until:
            await asyncio.sleep(0.02)
        assert process.pid in descendants(os.getpid()) and pids[0] in descendants(os.getpid())
        os.kill(pids[0], 9)
        process.kill()
        await process.wait()
        return pids

    assert len(asyncio.run(main())) == 1
