"""Heartbeats: what the processes of a run report to each other, through the store that connects them.

Every few seconds each process writes what it does and reads what the others wrote. The store is a TCP server
of rank 0 or of torchrun, so it can disappear or hang; every question to it has a time limit.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from graft.deadlines import Wait, clock, current, skip_frames_in
from graft.train.distributed.rank_status import (
    GONE,
    NOT_STARTED,
    RankPeer,
    RankStatus,
    name_ranks,
    reported_status,
    status_table,
)

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
        self.interval = min(5.0, deadline / 10)
        self.peers = {rank: RankPeer() for rank in range(world)}
        self.phase: tuple[str, float] = ("starting", time.monotonic())
        self.collective: Wait | None = None
        """The collective operation that this process is in."""
        self.on_failure: Callable[[ProcessFailure], None] | None = None
        self.on_late: Callable[[Wait], None] | None = None
        self.is_store_ours = False
        """Whether rank 0 holds the store, which then ends with it; else torchrun does."""
        self._store: Store | None = None
        self._is_lost = False
        """Whether the connection to the store broke."""
        self._is_mute = False
        """Whether the store once did not answer in time."""
        self._read_at = 0.0
        """When the store last answered; 0: not asked yet."""
        self._count = 0
        self._is_done = threading.Event()
        self._has_news = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="heartbeat", daemon=True)

    @property
    def patience(self) -> float:
        """Seconds after which a missing report means something."""
        return max(2.0, 3.5 * self.interval)

    @property
    def _is_stale(self) -> bool:
        """Whether the store has stopped answering."""
        return bool(self._read_at) and time.monotonic() - self._read_at > self.patience

    def meet(self) -> None:
        """Register this rank and wait until all are registered."""
        by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
        self.is_store_ours = not by_torchrun
        self._server = self._tcp(is_master=self.rank == 0 and not by_torchrun)  # ends with us
        self._store = self.connect()
        me = RankPeer.own()
        self._write()
        self._store.set(f"name/{self.rank}", json.dumps([me.host, me.pid, me.pid_namespace]))
        end, pause = time.monotonic() + self.deadline, 0.02
        while not self._store.check([f"name/{rank}" for rank in range(self.world)]):
            if time.monotonic() > end:
                missing = [rank for rank in self.peers if not self._is_registered(rank)]
                raise ProcessesLost(
                    f"waited {self.deadline:g} s for the {self.world} processes of this run to start, "
                    f"and {name_ranks(missing)} did not connect to {_address()}"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, 0.5)
        for rank in self.peers:
            self._is_registered(rank)

    def _is_registered(self, rank: int) -> bool:
        store = self._store
        if store is not None and not self.peers[rank].host and store.check([f"name/{rank}"]):
            found = json.loads(store.get(f"name/{rank}"))
            self.peers[rank] = RankPeer(*found, heard=time.monotonic())
        return bool(self.peers[rank].host)

    def connect(self) -> Store:
        """A new connection: on a shared one, a blocking call delays all others."""
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"graft/{restart}", self._tcp(is_master=False))

    def _tcp(self, is_master: bool) -> Store:
        if "MASTER_ADDR" not in os.environ:
            raise ValueError(
                "RANK is set, but not MASTER_ADDR, the address where the processes meet; start them "
                "with torchrun, which sets both, or unset RANK to run alone"
            )
        try:
            return TCPStore(
                os.environ["MASTER_ADDR"],
                env_number("MASTER_PORT"),
                is_master=is_master,
                wait_for_workers=False,
                timeout=timedelta(seconds=self.deadline),
            )
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
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    @property
    def is_stopped(self) -> bool:
        return self._is_done.is_set()

    def leave(self) -> None:
        """After a finished run. The holder of the store ends last: others may still read it."""
        self._ask(lambda store: store.set(f"left/{self.rank}", ""))
        self._keep_store_until("left", 5.0)

    def linger(self) -> None:
        """After a failure. The holder of the store waits until the others have read the cause."""
        self._keep_store_until("heard", 2.0 + 2 * FAILURE_CHECK)

    def _keep_store_until(self, key: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.rank == 0 and self.is_store_ours and time.monotonic() < end:
            others = [r for r, p in self.peers.items() if r and p.life() in ("alive", "unknown")]
            if self._ask(lambda store, others=others: store.check([f"{key}/{r}" for r in others])):
                return
            time.sleep(0.02)

    def claim(self) -> bool:
        """Whether this rank is the first to fail, or the store does not answer."""
        found = self._ask(lambda store: store.compare_set("claim", "", str(self.rank)))
        return found is None or found.decode() == str(self.rank)

    def post(self, failure: ProcessFailure) -> None:
        self._ask(lambda store: store.set("failure", json.dumps(asdict(failure))))

    def posted(self) -> ProcessFailure | None:
        return self._ask(self._read_failure)

    def gone(self) -> ProcessFailure | None:
        """A rank whose process has ended, or that has not reported from another machine."""
        self.refresh()
        for rank, status in self.statuses().items():
            if status.order != GONE and not (rank == 0 and self._is_lost and self.is_store_ours):
                continue
            peer = self.peers[rank]
            text = "its process was killed (SIGKILL or out of memory)"
            if status.age is not None and peer.life() == "unknown":
                text = f"it has not reported for {clock(status.age)}"
            return ProcessFailure(rank, "gone", f"{text}; it was last {peer.last}", time.time())
        return None

    def statuses(self) -> dict[int, RankStatus]:
        return {rank: self._status(rank) for rank in self.peers}

    def table(self, without: int = -1) -> dict[str, str]:
        """What each rank does; ranks that do the same are in one line."""
        table = status_table(item for item in self.statuses().items() if item[0] != without)
        if self._is_stale:
            return {"the store": f"at {_address()} does not answer, so this may be old", **table}
        return table

    def is_reported_by_lower_rank(self, wait: Wait) -> bool:
        """Whether a lower rank waits for the same operation: then that one prints the message."""
        statuses = [self._status(rank) for rank in range(self.rank)]
        return not self._is_stale and any(status.waits_for == wait.what for status in statuses)

    def _status(self, rank: int) -> RankStatus:
        if rank == self.rank and self.peers[rank].host:
            return reported_status(self._own_report(), 0.0)
        if not self._is_registered(rank):
            return NOT_STARTED
        return self.peers[rank].status(self._read_at or time.monotonic(), self.patience)

    def _own_report(self) -> dict[str, Any]:
        phase, since = self.phase
        report: dict[str, Any] = {"phase": phase, "for": time.monotonic() - since}
        collective, waits = self.collective, current()
        if collective is not None or waits:
            wait = collective or waits[0]
            is_together = collective is not None
            report |= {"waits_for": wait.what, "waits": wait.age, "is_together": is_together}
        return report

    def _keep(self) -> None:
        """Write and read reports until the end; failures of others are checked more often."""
        next_report = 0.0
        while not self._is_done.wait(min(FAILURE_CHECK, self.interval)):
            if not self._is_lost:
                try:
                    if self._has_news.is_set() or time.monotonic() > next_report:
                        self._has_news.clear()
                        next_report = time.monotonic() + self.interval
                        self._write()
                        self._read()
                    self._check_failure()
                except RuntimeError:
                    self._is_lost = True  # rank 0 or torchrun has ended; collectives will fail
            collective = self.collective
            if (
                self.on_late is not None
                and collective is not None
                and collective.age > self.deadline + self.interval
            ):
                self.on_late(collective)

    def _write(self) -> None:
        assert self._store is not None
        self._count += 1
        report = {"count": self._count, **self._own_report()}
        self._store.set(f"report/{self.rank}", json.dumps(report))

    def refresh(self) -> None:
        """Read the others' reports now, if the store answers."""
        self._ask(lambda store: self._read())

    def _read(self) -> None:
        store = self._store
        assert store is not None
        texts = store.multi_get([f"report/{rank}" for rank in self.peers])
        for peer, text in zip(self.peers.values(), texts, strict=True):
            report = json.loads(text)
            if report["count"] != peer.report.get("count"):
                peer.report, peer.heard = report, time.monotonic()
        self._read_at = time.monotonic()

    def _check_failure(self) -> None:
        assert self._store is not None
        if self.on_failure is not None and (failure := self._read_failure(self._store)):
            on_failure, self.on_failure = self.on_failure, None
            on_failure(failure)

    def _read_failure(self, store: Store) -> ProcessFailure | None:
        if not store.check(["failure"]):
            return None
        store.set(f"heard/{self.rank}", "")
        return ProcessFailure(**json.loads(store.get("failure")))

    def _ask(self, question: Callable[[Store], Any]) -> Any:
        """The store's answer; None if it does not answer, and then it is not asked again."""
        store = self._store
        if store is None or self._is_lost or self._is_mute:
            return None
        try:
            return within(2.0, lambda: question(store))
        except TimeoutError:
            self._is_mute = True
        except RuntimeError:
            self._is_lost = True
        return None


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """The call's result; TimeoutError if it takes longer, while a thread still waits for it."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]


def _address() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def env_number(name: str) -> int:
    """A variable that torchrun sets."""
    text = os.environ.get(name, "")
    if not text.isdigit():
        raise ValueError(
            f"RANK is set, but {name} is {text!r}; start the processes with torchrun, which sets all "
            "of them, or unset RANK to run alone"
        )
    return int(text)
