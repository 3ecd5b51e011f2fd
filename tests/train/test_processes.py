"""Several real processes: what they do together, and what is on the screen when one of them fails.

Children are forked by a server that has torch loaded already, write to one file as to one terminal,
and meet at a port of this machine. One test starts them as users do, with torchrun.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graft.deadlines import waiting
from graft.train.distributed.failures import describe
from graft.train.distributed.heartbeat import ProcessesLost, ProcessFailure, RankHeartbeat
from graft.train.distributed.process_group import ProcessGroup, _buckets
from graft.train.distributed.rank_status import RankReport, RankStatus, name_ranks
from tests.processes import free_port

CPU = torch.device("cpu")
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def enter(rank: int, world: int, port: int, folder: str, work: Callable, deadline: float) -> None:
    """In the child: become a rank, as torchrun would have made us one."""
    screen = os.open(f"{folder}/screen", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(screen, 1)
    os.dup2(screen, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/error{rank}"
    processes = ProcessGroup.start(deadline, CPU)
    with processes.guarded():
        result = work(processes, Path(folder))
        Path(f"{folder}/result{rank}").write_text(json.dumps(result))
    processes.close()


class RankGroup:
    """The ranks of one test."""

    def __init__(self, folder: Path, members: list[Any]) -> None:
        self.folder, self.members = folder, members

    @property
    def screen(self) -> str:
        path = self.folder / "screen"
        return path.read_text("utf-8") if path.exists() else ""

    def lines(self) -> list[str]:
        """What graft prints; the C++ side of torch may print warnings beside it."""
        return [line for line in self.screen.splitlines() if line.startswith("graft: ")]

    def until(self, is_so: Callable[[], bool], seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < end, f"not so within {seconds} s:\n{self.screen}"
            time.sleep(0.02)

    def end(self, seconds: float = 40.0) -> list[int]:
        """Their exit codes."""
        end = time.monotonic() + seconds
        for member in self.members:
            member.join(max(0.0, end - time.monotonic()))
        assert all(member.exitcode is not None for member in self.members), self.screen
        return [member.exitcode for member in self.members]

    def results(self) -> list[Any]:
        assert self.end() == [0] * len(self.members), self.screen
        paths = [self.folder / f"result{rank}" for rank in range(len(self.members))]
        return [json.loads(path.read_text()) for path in paths]


@contextmanager
def started(
    folder: Path, world: int, work: Callable, deadline: float = 30.0
) -> Iterator[RankGroup]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    port = free_port()
    members = [
        context.Process(target=enter, args=(rank, world, port, str(folder), work, deadline))
        for rank in range(world)
    ]
    for member in members:
        member.start()
    try:
        yield RankGroup(folder, members)
    finally:
        for member in members:
            if member.exitcode is None:
                os.kill(member.pid, signal.SIGKILL)
            member.join(10)


# alone


@pytest.fixture
def alone(monkeypatch) -> ProcessGroup:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    return ProcessGroup.start(600, CPU)


def test_alone_everything_is_trivial_and_there_is_no_process_group(alone):
    tensor = torch.tensor([1.0, 2.0])
    assert (alone.rank, alone.world, alone.is_first) == (0, 1, True)
    assert (alone.dp_rank, alone.dp_size, alone.tp_rank) == (0, 1, 0)
    assert alone.gather("a", "x") == ["a"]
    assert alone.share(3, "x") == 3
    alone.add([tensor], "x")
    assert tensor.tolist() == [1.0, 2.0]
    assert alone.max_over_ranks(2.5, "x") == 2.5
    assert alone.any(True, "x") is True
    assert alone.any(False, "x") is False
    alone.barrier("x")
    alone.doing("sampling")
    assert not dist.is_initialized()
    with pytest.raises(KeyError), alone.guarded():  # the caller's own error
        raise KeyError("a")
    alone.close()


def test_one_process_without_torchrun_is_alone(monkeypatch, alone):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert ProcessGroup.start(600, CPU).world == 1
    assert not dist.is_initialized()


def test_a_mesh_of_one_process_can_be_had(alone):
    mesh = alone.mesh(1)
    assert mesh.mesh_dim_names == ("dp", "tp")
    assert mesh.mesh.tolist() == [[0]]
    alone.close()
    assert not dist.is_initialized()


def test_a_tp_that_does_not_divide_the_processes_is_refused_with_those_that_do(alone):
    alone.world = 6
    with pytest.raises(ValueError, match=r"tp=4 .* the 6 processes .* possible here: 1, 2, 3, 6"):
        alone.mesh(4)


def test_a_half_set_environment_is_refused(monkeypatch, alone):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match=r"RANK is set, but not WORLD_SIZE; start .* torchrun"):
        ProcessGroup.start(1, CPU)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match="but not MASTER_ADDR"):
        ProcessGroup.start(1, CPU)


def test_ranks_are_listed_in_ranges():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([5, 0, 2, 1]) == "ranks 0-2, 5"


def test_buckets_hold_tensors_of_one_type_up_to_a_size(monkeypatch):
    monkeypatch.setattr("graft.train.distributed.process_group.BUCKET", 16)
    a, b, c = torch.zeros(2), torch.zeros(2, dtype=torch.int32), torch.zeros(3)
    d = torch.zeros(1)
    found = list(_buckets([a, b, c, d]))  # 8 + 12 bytes of floats fill one
    assert [[id(t) for t in bucket] for bucket in found] == [
        [id(a), id(c)],
        [id(b)],
        [id(d)],
    ]


def test_errors_of_graft_are_described_by_their_text_and_others_with_a_traceback():
    with pytest.raises(ProcessesLost) as lost:
        raise ProcessesLost("rank 1 did not arrive")
    assert describe(lost.value) == "rank 1 did not arrive"
    with pytest.raises(ZeroDivisionError) as bug:
        _ = 1 // 0
    printed = describe(bug.value).splitlines()
    assert printed[0] == "ZeroDivisionError: integer division or modulo by zero"
    assert printed[1] == "Traceback (most recent call last):"
    assert str(ProcessFailure(2, "failed", "no room", 0.0)) == "rank 2 failed: no room"


def heartbeat_of(world: int) -> RankHeartbeat:
    """Rank 0's; all other ranks have just reported."""
    heartbeat = RankHeartbeat(0, world, deadline=600.0)
    for rank in range(world):
        report(heartbeat, rank, RankStatus("starting"))
    return heartbeat


def report(
    heartbeat: RankHeartbeat, rank: int, status: RankStatus, seconds_ago: float = 0.0
) -> None:
    read_at = time.monotonic() - seconds_ago
    heartbeat.reports[rank] = RankReport(f"host{rank}", 40 + rank, 1, status, read_at)


def test_ranks_that_do_the_same_are_in_one_line_and_those_waited_for_come_first():
    heartbeat = heartbeat_of(5)
    heartbeat.set_phase("learning")
    for rank, seconds in ((1, 31.0), (2, 29.0), (4, 30.0)):
        report(heartbeat, rank, RankStatus("waiting for the rewards", seconds, "the rewards"))
    report(heartbeat, 3, RankStatus("sampling (waiting 0:07 for a tool)", 42.0))
    assert heartbeat.table() == {
        "rank 0": "is learning, since 0:00",
        "rank 3": "is sampling (waiting 0:07 for a tool), since 0:42",
        "ranks 1-2, 4": "are waiting for the rewards, since 0:31",
    }
    assert "rank 0" not in heartbeat.table(without=0)


def test_a_rank_that_stops_reporting_counts_as_gone():
    heartbeat = heartbeat_of(3)
    assert heartbeat.gone() is None
    report(heartbeat, 2, RankStatus("sampling, step 4", 1.0), seconds_ago=42)
    assert heartbeat.table()["rank 2"] == (
        "is silent since 0:42 (pid 42 on host2); it was last sampling, step 4"
    )
    gone = heartbeat.gone()
    assert gone is not None
    assert (gone.rank, gone.kind) == (2, "gone")
    assert gone.text == (
        "it has not reported for 0:42, its process may have been killed; it was last sampling, step 4"
    )


def test_a_report_names_the_collective_or_the_phase_and_its_wait():
    heartbeat = heartbeat_of(2)
    heartbeat.set_phase("sampling")
    with waiting("a tool") as wait:
        assert heartbeat.table(without=1) == {
            "rank 0": "is sampling (waiting 0:00 for a tool), since 0:00"
        }
        heartbeat.collective = wait
        assert heartbeat.table(without=1) == {"rank 0": "is waiting for a tool, since 0:00"}


# together


def exchange(processes: ProcessGroup, folder: Path) -> Any:
    rank = processes.rank
    sums = [
        torch.full((2, 2), rank + 1.0).T[:1],  # not in one piece
        torch.tensor([rank, 10]),
        torch.tensor(rank + 0.5, dtype=torch.float64),
        torch.full((3,), 2.0**rank, dtype=torch.bfloat16),
    ]
    processes.add(sums, "the sums")
    processes.barrier("a pause")
    return {
        "gather": processes.gather({"rank": rank, "text": "é" * rank}, "the texts"),
        "share": processes.share(["from", rank], "the plan"),
        "add": [tensor.tolist() for tensor in sums],
        "most": processes.max_over_ranks(-float(rank), "the largest"),
        "any": [processes.any(rank == 2, "if any"), processes.any(False, "if any")],
    }


def test_three_processes_exchange_values(tmp_path):
    with started(tmp_path, 3, exchange) as group:
        results = group.results()
        want = {
            "gather": [
                {"rank": 0, "text": ""},
                {"rank": 1, "text": "é"},
                {"rank": 2, "text": "éé"},
            ],
            "share": ["from", 0],
            "add": [[[6.0, 6.0]], [3, 30], 4.5, [7.0, 7.0, 7.0]],  # 1+2+3; 0+1+2, 10x3; ...; 1+2+4
            "most": 0.0,
            "any": [True, False],
        }
        assert results == [want] * 3
        assert group.screen == ""


def meshed(processes: ProcessGroup, folder: Path) -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = processes.mesh(2)
    timeouts = {
        name: mesh.get_group(name)._get_backend(CPU).options._timeout for name in ("dp", "tp")
    }
    module = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.ones_(module.weight)
    flat = processes.mesh(1)
    fully_shard(module, mesh=flat["dp"])
    module(torch.ones(1, 4)).sum().backward()
    grad = module.weight.grad.full_tensor()
    return {
        "shape": list(mesh.shape),
        "names": list(mesh.mesh_dim_names or ()),
        "place": list(mesh.get_coordinate() or ()),
        "seconds": [timeout.total_seconds() for timeout in timeouts.values()],
        "grad": grad.sum().item(),
        "sizes": [processes.dp_rank, processes.dp_size, processes.tp_rank],
    }


@pytest.mark.slow
def test_the_groups_of_a_mesh_keep_our_deadline_and_carry_fsdp(tmp_path):
    with started(tmp_path, 2, meshed, deadline=25.0) as group:
        for rank, result in enumerate(group.results()):
            assert result["shape"] == [1, 2]
            assert result["names"] == ["dp", "tp"]
            assert result["place"] == [0, rank]
            assert result["seconds"] == [25.0, 25.0]
            assert result["grad"] == 16.0  # the mean over two equal batches
            assert result["sizes"] == [rank, 2, 0]


def out_of_step(processes: ProcessGroup, folder: Path) -> None:
    if processes.is_first:
        processes.gather(1, "the lengths of step 12")
    else:
        processes.add([torch.ones(5)], "the gradients of step 11")


@pytest.mark.slow
def test_processes_in_different_operations_name_both(tmp_path):
    with started(tmp_path, 2, out_of_step) as group:
        assert group.end() == [1, 1]
        assert (
            "rank 0: the lengths of step 12; rank 1: the gradients of step 11" in group.lines()[0]
        )


# failures


def raise_on_two(processes: ProcessGroup, folder: Path) -> None:
    processes.barrier("the start")
    if processes.rank == 2:
        raise ProcessesLost("the disk of this machine is full")
    if processes.rank == 1:
        processes.doing("sampling")
        time.sleep(60)  # busy, in no collective: the heartbeat has to interrupt it
    dist.all_reduce(torch.ones(1))  # of torch's own, without a name


def test_an_error_is_printed_first_and_ends_all_processes(tmp_path):
    with started(tmp_path, 3, raise_on_two) as group:
        begin = time.monotonic()
        assert group.end() == [1, 1, 1]
        assert time.monotonic() - begin < 20
        host = socket.gethostname()
        lines = group.lines()
        assert group.screen.startswith("graft: rank 2 of 3 on ")
        assert lines[0] == f"graft: rank 2 of 3 on {host} failed: the disk of this machine is full"
        assert sorted(lines[1:]) == [
            "graft: rank 0 stops, because rank 2 failed: the disk of this machine is full",
            "graft: rank 1 stops, because rank 2 failed: the disk of this machine is full",
        ]
        causes = [json.loads((tmp_path / f"error{rank}").read_text()) for rank in range(3)]
        times = [int(cause["message"]["extraInfo"]["timestamp"]) for cause in causes]
        assert times[2] < min(times[:2])  # torchrun calls the earliest the root cause
        assert causes[2]["message"]["message"] == "the disk of this machine is full"


def bug_on_zero(processes: ProcessGroup, folder: Path) -> None:
    if processes.is_first:  # which also holds the store
        print(1 // 0)
    processes.barrier("the start")


def test_a_bug_on_rank_0_shows_its_traceback_once_and_the_others_name_it(tmp_path):
    with started(tmp_path, 2, bug_on_zero) as group:
        assert group.end() == [1, 1]
        lines = group.lines()
        assert "rank 0 of 2" in lines[0] and "failed: ZeroDivisionError: " in lines[0]
        assert group.screen.count("Traceback") == 1
        assert "in bug_on_zero" in group.screen
        assert lines[1:] == [
            "graft: rank 1 stops, because rank 0 failed: ZeroDivisionError: "
            "integer division or modulo by zero"
        ]


def same_error(processes: ProcessGroup, folder: Path) -> None:
    processes.barrier("the start")
    raise ProcessesLost("train.lr is negative")


def test_an_error_of_all_ranks_is_printed_once(tmp_path):
    with started(tmp_path, 3, same_error) as group:
        assert group.end() == [1, 1, 1]
        assert (
            sum("failed: train.lr" in line and " of 3 on " in line for line in group.lines()) == 1
        )
        assert sum(" stops, because rank" in line for line in group.lines()) == 2


def one_sleeps(processes: ProcessGroup, folder: Path) -> None:
    processes.barrier("the start")
    if processes.rank == 1:
        processes.doing("sampling, step 12")
        time.sleep(60)
    processes.gather(1, "the rewards of step 12")


@pytest.mark.slow
def test_at_the_deadline_the_missing_rank_and_what_it_did_are_named(tmp_path):
    with started(tmp_path, 3, one_sleeps, deadline=5.0) as group:
        begin = time.monotonic()
        assert group.end() == [1, 1, 1]
        assert time.monotonic() - begin < 25
        screen = group.screen
        failed = next(line for line in group.lines() if " failed: " in line)
        assert "failed: waited 5 s for the rewards of step 12, and rank 1 did not arrive" in failed
        printed = screen[screen.index(failed) :].splitlines()
        assert printed[1].startswith("       rank 1 is sampling, step 12, since 0:0")
        assert printed[2].startswith(
            "       ranks 0, 2 are waiting for the rewards of step 12, since 0:0"
        )
        stops = [line for line in group.lines() if " stops, because " in line]
        assert len(stops) == 2  # the sleeper among them
        assert screen.index(failed) < min(screen.index(line) for line in stops)


def hang_out_of_reach(processes: ProcessGroup, folder: Path) -> None:
    processes.barrier("the start")
    if processes.is_first:
        # as on a GPU, whose library can be neither looked into nor broken off
        processes._heartbeat.on_late = processes._failures.on_late
        with processes.together("the gradients of step 2"):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            time.sleep(60)
    processes.doing("sampling, step 2")
    time.sleep(60)


@pytest.mark.slow
def test_a_process_that_ignores_exceptions_is_ended_at_the_deadline(tmp_path):
    with started(tmp_path, 2, hang_out_of_reach, deadline=4.0) as group:
        assert group.end() == [1, 1]
        failed = next(line for line in group.lines() if " failed: " in line)
        assert "failed: waited 4 s for the gradients of step 2, and rank 1 did not arrive" in failed


def wait_for_ever(processes: ProcessGroup, folder: Path) -> None:
    processes.barrier("the start")
    (folder / f"pid{processes.rank}").write_text(str(os.getpid()))
    if processes.rank == processes.world - 1:
        processes.doing("sampling, step 7")
        time.sleep(60)
    processes.gather(1, "the rewards of step 7")


def pid_of(group: RankGroup, rank: int) -> int:
    """Once all have passed the start."""
    paths = [group.folder / f"pid{rank}" for rank in range(len(group.members))]
    group.until(lambda: all(path.exists() and path.read_text() for path in paths))
    return int(paths[rank].read_text())


def test_a_killed_process_is_named_by_the_others(tmp_path):
    with started(tmp_path, 3, wait_for_ever, deadline=8.0) as group:
        pid = pid_of(group, 2)
        time.sleep(1.0)  # for a report of what it does
        os.kill(pid, signal.SIGKILL)
        begin = time.monotonic()
        assert group.end() == [1, 1, -signal.SIGKILL]
        assert time.monotonic() - begin < 15
        host = socket.gethostname()
        gone, stops = (line for line in group.lines() if " is gone: " in line)
        assert gone.startswith(f"graft: rank 2 of 3 on {host} is gone: it has not reported for 0:0")
        assert gone.endswith("it was last sampling, step 7")
        assert " stops, because rank 2 is gone: " in stops


def wait_for_zero(processes: ProcessGroup, folder: Path) -> None:
    processes.barrier("the start")
    (folder / f"pid{processes.rank}").write_text(str(os.getpid()))
    if processes.is_first:
        time.sleep(60)
    processes.gather(1, "the rewards of step 7")


def test_a_killed_rank_0_ends_the_store_and_is_still_named(tmp_path):
    with started(tmp_path, 2, wait_for_zero, deadline=20.0) as group:
        os.kill(pid_of(group, 0), signal.SIGKILL)
        assert group.end() == [-signal.SIGKILL, 1]
        host = socket.gethostname()
        assert group.lines()[0].startswith(
            f"graft: rank 0 of 2 on {host} is gone: its store does not answer"
        )
        assert len(group.lines()) == 1


@pytest.mark.slow
def test_a_stopped_process_is_reported_by_the_watchdog(tmp_path):
    with started(tmp_path, 2, wait_for_ever, deadline=8.0) as group:
        pid = pid_of(group, 1)
        time.sleep(1.0)
        os.kill(pid, signal.SIGSTOP)
        group.until(lambda: " is silent since " in group.screen)
        lines = group.screen[
            group.screen.index("graft: rank 0 waits for the rewards") :
        ].splitlines()
        assert lines[0].startswith("graft: rank 0 waits for the rewards of step 7 since 0:0")
        assert "test_processes.py:" in lines[0]  # not processes.py, which waits in our name
        silent = next(line for line in group.screen.splitlines() if " is silent since " in line)
        assert "rank 1 is silent since 0:0" in silent
        assert f"(pid {pid} on " in silent
        assert "it was last sampling, step 7" in silent
        os.kill(pid, signal.SIGKILL)
        assert group.end()[0] == 1


@pytest.mark.slow
def test_a_stopped_rank_0_stops_the_store_too_and_the_others_still_end_at_the_deadline(tmp_path):
    with started(tmp_path, 2, wait_for_zero, deadline=6.0) as group:
        pid = pid_of(group, 0)
        time.sleep(1.0)
        os.kill(pid, signal.SIGSTOP)
        group.members[1].join(30)
        assert group.members[1].exitcode == 1, group.screen
        failed = next(line for line in group.lines() if " failed: " in line)
        assert "rank 1 of 2" in failed
        assert "waited 6 s for the rewards of step 7, and rank 0 did not arrive" in failed
        printed = group.screen[group.screen.index(failed) :]
        assert re.search("the store at .* does not answer", printed)


def interrupted(processes: ProcessGroup, folder: Path) -> None:
    processes.barrier("the start")
    (folder / f"pid{processes.rank}").write_text(str(os.getpid()))
    time.sleep(60)


def test_an_interruption_of_one_is_no_failure_and_stops_all(tmp_path):
    with started(tmp_path, 2, interrupted) as group:
        os.kill(pid_of(group, 1), signal.SIGINT)
        group.end()
        assert group.lines() == []
        assert group.screen.count("KeyboardInterrupt") >= 2  # by multiprocessing, which catches it


def test_processes_that_never_start_are_named(tmp_path, monkeypatch, alone):
    values = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    notes: list[str] = []
    with pytest.raises(
        ProcessesLost, match=r"waited 1 s for the 4 .* and ranks 1-3 did not connect"
    ):
        ProcessGroup.start(1.0, CPU, note=notes.append)
    assert notes[0].startswith("rank 0 waits for the other processes to start since 0:00, in ")
    assert notes[0].splitlines()[1:] == ["ranks 1-3 are not started yet"]


@pytest.mark.slow
def test_under_torchrun_the_cause_is_first_and_torchrun_names_it_too(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        "import torch\n"
        "from graft.train.distributed.process_group import ProcessGroup\n"
        "processes = ProcessGroup.start(30.0, 'cpu')\n"
        "with processes.guarded():\n"
        "    print(processes.gather(processes.rank, 'the ranks'), flush=True)\n"
        "    if processes.rank == 1:\n"
        "        raise ValueError('no such recipe')\n"
        "    processes.barrier('the end')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "--master-port", str(free_port()), str(script)],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 1
    assert done.stdout.count("[0, 1]") == 2  # two processes write to one pipe, maybe to one line
    graft = [line for line in done.stderr.splitlines() if line.startswith("graft: ")]
    assert graft[0].startswith("graft: rank 1 of 2 on ")
    assert graft[0].endswith("failed: ValueError: no such recipe")
    root = done.stderr.partition("Root Cause")[2]
    assert "rank      : 1" in root
    assert "ValueError: no such recipe" in root
