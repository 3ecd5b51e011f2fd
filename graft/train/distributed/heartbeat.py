"""Heartbeats: what the processes of a run report to each other, through the store that connects them.

Every few seconds each process writes what it does and reads what the others wrote, so a process that waits
for long can print

    rank 0 waits for the lengths of step 12 since 0:31, in graft/train/rl.py:80
    rank 1 is sampling, step 12, since 0:42

The store is a TCP server of rank 0 or of torchrun, so it can disappear or hang; every call has a time limit.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from graft.deadlines import Wait, clock, current, skip_frames_in, within
from graft.train.distributed.rank_status import RankReport, RankStatus, name_ranks, status_table
from graft.train.distributed.stores import open_store

skip_frames_in(__file__)

FAILURE_CHECK = 0.3
"""Seconds between two checks whether another rank has failed."""


@dataclass(frozen=True, slots=True)
class ProcessFailure:
    """Why the run ends, as one process posts it for the others."""

    rank: int
    kind: str
    """failed, gone or interrupted."""
    text: str
    at: float
    """Seconds since 1970."""

    def __str__(self) -> str:
        if self.kind == "interrupted":
            return f"rank {self.rank} was interrupted"
        return f"rank {self.rank} {'is gone' if self.kind == 'gone' else 'failed'}: {self.text}"


class ProcessesLost(RuntimeError):
    """A collective operation failed; the text names the ranks that did not arrive and what they did."""

    def __init__(self, text: str, cause: ProcessFailure | None = None) -> None:
        super().__init__(text)
        self.cause = cause


class RankHeartbeat:
    """This rank's reports in the store, and the latest ones of the others.

    One key for each rank, rewritten every few seconds by a thread that also reads those of the others.
    """

    def __init__(self, rank: int, world: int, deadline: float) -> None:
        self.rank, self.world, self.deadline = rank, world, deadline
        self.interval = min(2.0, deadline / 10)
        self.patience = max(2.0, 3.5 * self.interval)
        """Seconds after which a missing report means something."""
        self.reports: dict[int, RankReport] = {}
        """By rank; a process that has not started has none."""
        self.phase: tuple[str, float] = ("starting", time.monotonic())
        self.collective: Wait | None = None
        """The collective operation that this process is in."""
        self.on_failure: Callable[[ProcessFailure], None] | None = None
        self.on_late: Callable[[Wait], None] | None = None
        self.is_store_ours = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") != "True"
        """Whether rank 0 holds the store, which then ends with it; else torchrun does."""
        self._store: Store | None = None
        self._is_lost = False
        """Whether the store does not answer any more."""
        self._read_at = 0.0
        """When the store last answered; 0: not read yet."""
        self._num_reports = 0
        self._is_done = threading.Event()
        self._has_news = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    @property
    def _is_stale(self) -> bool:
        """Whether the store has stopped answering."""
        return bool(self._read_at) and time.monotonic() - self._read_at > self.patience

    def join(self) -> None:
        """Report this rank and wait until all have reported."""
        self._server = self._tcp(is_master=self.rank == 0 and self.is_store_ours)  # ends with us
        self._store = store = self.connect()
        self._write(store)
        end, pause = time.monotonic() + self.deadline, 0.02
        while missing := self._read(store):
            if time.monotonic() > end:
                raise ProcessesLost(
                    f"waited {self.deadline:g} s for the {self.world} processes of this run to start, "
                    f"and {name_ranks(missing)} did not connect to {_address()}"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, 0.5)

    def connect(self) -> Store:
        """A new connection: on a shared one, a blocking call delays all others."""
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"graft/{restart}", self._tcp(is_master=False))

    def _tcp(self, is_master: bool) -> Store:
        host, port = launch_variable("MASTER_ADDR"), int(launch_variable("MASTER_PORT"))
        timeout = timedelta(seconds=self.deadline)
        try:
            if is_master:
                return open_store(host, port, timeout)
            return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        except RuntimeError as error:
            seen = str(error).partition("\n")[0]
            does = "cannot listen" if is_master else "finds no server"
            raise ProcessesLost(
                f"rank {self.rank} {does} at {_address()} ({seen}); check MASTER_ADDR, MASTER_PORT "
                "and the network between the machines"
            ) from error

    def start(self) -> None:
        self._thread.start()

    def set_phase(self, phase: str) -> None:
        self.phase = phase, time.monotonic()
        self._has_news.set()

    def stop(self) -> None:
        self._is_done.set()
        self._thread.join(timeout=1.0)

    @property
    def is_stopped(self) -> bool:
        return self._is_done.is_set()

    def linger(self) -> None:
        """Let the holder of the store wait after a failure until the others have read the cause."""
        end = time.monotonic() + 2.0 + 2 * FAILURE_CHECK
        others = [f"read/{rank}" for rank in range(1, self.world)]
        while self.rank == 0 and self.is_store_ours and time.monotonic() < end:
            if self._call(lambda store: store.check(others)):
                return
            time.sleep(0.02)

    def claim(self) -> bool:
        """Whether this rank is the first to fail, or the store does not answer."""
        found = self._call(lambda store: store.compare_set("claim", "", str(self.rank)))
        return found is None or found.decode() == str(self.rank)

    def post(self, failure: ProcessFailure) -> None:
        self._call(lambda store: store.set("failure", json.dumps(asdict(failure))))

    def posted(self) -> ProcessFailure | None:
        return self._call(self._read_failure)

    def gone(self) -> ProcessFailure | None:
        """A rank that has stopped reporting, or rank 0 if its store is gone."""
        self.refresh()
        for rank, report in self.reports.items():
            silence = self._silence(report)
            if rank == 0 and self._is_lost and self.is_store_ours:
                text = "its store does not answer"
            elif rank != self.rank and silence > self.patience:
                text = f"it has not reported for {clock(silence)}"
            else:
                continue
            text += f", its process may have been killed; it was last {report.status.text}"
            return ProcessFailure(rank, "gone", text, time.time())
        return None

    def statuses(self) -> dict[int, RankStatus]:
        return {rank: self._status(rank) for rank in range(self.world)}

    def table(self, without: int = -1) -> dict[str, str]:
        """What each rank does; ranks that do the same are in one line."""
        table = status_table(item for item in self.statuses().items() if item[0] != without)
        if self._is_stale:
            return {"the store": f"at {_address()} does not answer, so this may be old", **table}
        return table

    def is_reported_by_lower_rank(self, wait: Wait) -> bool:
        """Whether a lower rank waits for the same operation: then that one prints the message."""
        statuses = [self._status(rank) for rank in range(self.rank)]
        return not self._is_stale and any(status.collective == wait.what for status in statuses)

    def _silence(self, report: RankReport) -> float:
        """Seconds without a new report, up to the time when the store last answered."""
        return (self._read_at or time.monotonic()) - report.read_at

    def _status(self, rank: int) -> RankStatus:
        if rank == self.rank:
            return self._own_status()
        if (report := self.reports.get(rank)) is None:
            return RankStatus("not started yet")
        status = report.status
        if (silence := self._silence(report)) > self.patience:
            process = f"(pid {report.pid} on {report.host})"
            return RankStatus(f"silent since {clock(silence)} {process}; it was last {status.text}")
        return status._replace(age=(status.age or 0.0) + time.monotonic() - report.read_at)

    def _own_status(self) -> RankStatus:
        if (wait := self.collective) is not None:
            return RankStatus(f"waiting for {wait.what}", wait.age, wait.what)
        phase, since = self.phase
        waits = current()
        within = f" (waiting {clock(waits[0].age)} for {waits[0].what})" if waits else ""
        return RankStatus(f"{phase}{within}", time.monotonic() - since)

    def _run(self) -> None:
        """Write and read reports until the end; failures of others are checked more often."""
        next_report = 0.0
        store = self._store
        assert store is not None
        while not self._is_done.wait(min(FAILURE_CHECK, self.interval)):
            if not self._is_lost:
                try:
                    if self._has_news.is_set() or time.monotonic() > next_report:
                        self._has_news.clear()
                        next_report = time.monotonic() + self.interval
                        self._write(store)
                        self._read(store)
                    if self.on_failure is not None and (failure := self._read_failure(store)):
                        on_failure, self.on_failure = self.on_failure, None
                        on_failure(failure)
                except RuntimeError:
                    self._is_lost = True  # rank 0 or torchrun has ended; collectives will fail
            wait, latest = self.collective, self.deadline + self.interval
            if self.on_late is not None and wait is not None and wait.age > latest:
                self.on_late(wait)

    def _write(self, store: Store) -> None:
        self._num_reports += 1
        report = [socket.gethostname(), os.getpid(), self._num_reports, self._own_status()]
        store.set(f"report/{self.rank}", json.dumps(report))

    def refresh(self) -> None:
        """Read the others' reports now, if the store answers."""
        self._call(self._read)

    def _read(self, store: Store) -> list[int]:
        """Read all reports; returns the ranks that have none."""
        ranks = range(self.world)
        missing = [r for r in ranks if r not in self.reports and not store.check([f"report/{r}"])]
        there = [rank for rank in ranks if rank not in missing]
        texts = store.multi_get([f"report/{rank}" for rank in there])
        for rank, text in zip(there, texts, strict=True):
            host, pid, number, status = json.loads(text)
            if rank not in self.reports or number != self.reports[rank].number:
                now = time.monotonic()
                self.reports[rank] = RankReport(host, pid, number, RankStatus(*status), now)
        self._read_at = time.monotonic()
        return missing

    def _read_failure(self, store: Store) -> ProcessFailure | None:
        if not store.check(["failure"]):
            return None
        store.set(f"read/{self.rank}", "")
        return ProcessFailure(**json.loads(store.get("failure")))

    def _call(self, method: Callable[[Store], Any]) -> Any:
        """The store's answer; None if it does not answer, and then it is not called again."""
        store = self._store
        if store is None or self._is_lost:
            return None
        try:
            return within(2.0, lambda: method(store))
        except (TimeoutError, RuntimeError):
            self._is_lost = True
        return None


def _address() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def launch_variable(name: str) -> str:
    """An environment variable that torchrun sets."""
    if not os.environ.get(name):
        raise ValueError(
            f"RANK is set, but not {name}; start the processes with torchrun, which sets both, or "
            "unset RANK to run alone"
        )
    return os.environ[name]
