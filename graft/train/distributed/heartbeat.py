"""What the processes of a run tell each other while they wait: a board in the store between them.

Every few seconds each writes what it is about, and reads what the others wrote. Of those on the same
machine the kernel knows more: whether they are gone, or stopped by a signal.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from graft.deadlines import Wait, clock, current, pass_over

pass_over(__file__)

GLANCE = 0.3
"""Seconds between two looks whether somebody has failed."""


@dataclass(frozen=True, slots=True)
class ProcessFailure:
    """Why the run ends, as one process tells the others."""

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
    """Something could not be done together; the text says who did not come and what they did."""

    def __init__(self, text: str, cause: ProcessFailure | None = None) -> None:
        super().__init__(text)
        self.cause = cause


@dataclass(slots=True)
class _State:
    """What one rank does, in words that can be put together for several."""

    one: str
    many: str
    rest: str
    age: float | None = None
    waits_for: str = ""
    order: int = 3
    """Who others wait for is told first."""


@dataclass(slots=True)
class _Peer:
    """What is known of one rank."""

    host: str = ""
    pid: int = 0
    born: str = ""
    space: str = ""
    """Where its pid is valid."""
    report: dict[str, Any] = field(default_factory=dict)
    heard: float = 0.0
    """When its report last changed, by our clock: theirs may show another time."""


class RankHeartbeat:
    """The notice board in the store: who is there, what each does, who has failed.

    One key for each rank, rewritten every few seconds by a thread that also reads those of the
    others. The store may itself be gone or stopped, with rank 0 or torchrun, so that whoever else
    asks it does so for a limited time.
    """

    def __init__(self, rank: int, world: int, deadline: float) -> None:
        self.rank, self.world, self.deadline = rank, world, deadline
        self.beat = min(5.0, deadline / 10)
        self.peers = {rank: _Peer() for rank in range(world)}
        self.phase: tuple[str, float] = ("starting", time.monotonic())
        self.block: Wait | None = None
        """What this process does together with the others just now."""
        self.on_failure: Callable[[ProcessFailure], None] | None = None
        self.on_late: Callable[[Wait], None] | None = None
        self.is_ours = False
        """Whether rank 0 holds the store, and takes it along when it ends; else torchrun does."""
        self._store: Store | None = None
        self._is_lost = False
        self._is_deaf = False
        self._read_at = 0.0
        """When the store has last answered; 0: not asked yet."""
        self._count = 0
        self._is_done = threading.Event()
        self._has_news = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="processes", daemon=True)

    @property
    def patience(self) -> float:
        """Seconds after which silence means something."""
        return max(2.0, 3.5 * self.beat)

    @property
    def _is_mute(self) -> bool:
        """Whether the store has stopped answering."""
        return bool(self._read_at) and time.monotonic() - self._read_at > self.patience

    def meet(self) -> None:
        """Write our name on the board and wait until all names are there."""
        self._server = self._serve_or_join()  # kept: the store ends with it
        self._store = self.connect()
        me = _Peer(socket.gethostname(), os.getpid(), _born(os.getpid()), _space())
        self._write()
        self._store.set(f"name/{self.rank}", json.dumps([me.host, me.pid, me.born, me.space]))
        end, pause = time.monotonic() + self.deadline, 0.02
        while not self._store.check([f"name/{rank}" for rank in range(self.world)]):
            if time.monotonic() > end:
                missing = [rank for rank in self.peers if not self._has_come(rank)]
                raise ProcessesLost(
                    f"waited {self.deadline:g} s for the {self.world} processes of this run to start, "
                    f"and {ranks_in_words(missing)} did not come to {_address()}"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, 0.5)
        for rank in self.peers:
            self._has_come(rank)

    def _has_come(self, rank: int) -> bool:
        """Also learn its name, if so."""
        store = self._store
        if store is not None and not self.peers[rank].host and store.check([f"name/{rank}"]):
            found = json.loads(store.get(f"name/{rank}"))
            self.peers[rank] = _Peer(*found, heard=time.monotonic())
        return bool(self.peers[rank].host)

    def connect(self) -> Store:
        """A connection of its own: on one that is shared, whoever waits holds up the others."""
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"graft/{restart}", self._tcp(is_master=False))

    def _serve_or_join(self) -> Store:
        by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
        self.is_ours = not by_torchrun
        return self._tcp(is_master=self.rank == 0 and not by_torchrun)

    def _tcp(self, is_master: bool) -> Store:
        if "MASTER_ADDR" not in os.environ:
            raise ValueError(
                "RANK is set, but not MASTER_ADDR, where the processes are to meet; start them with "
                "torchrun, which sets both, or unset RANK to run alone"
            )
        try:
            return TCPStore(
                os.environ["MASTER_ADDR"],
                number_in("MASTER_PORT"),
                is_master=is_master,
                wait_for_workers=False,
                timeout=timedelta(seconds=self.deadline),
            )
        except RuntimeError as error:
            seen = str(error).partition("\n")[0]
            does = "cannot listen" if is_master else "finds nobody listening"
            raise ProcessesLost(
                f"rank {self.rank} {does} at {_address()} ({seen}); check MASTER_ADDR, MASTER_PORT "
                "and what lies between the machines"
            ) from error

    def start(self) -> None:
        self._thread.start()

    def tell(self, phase: str) -> None:
        self.phase = phase, time.monotonic()
        self._has_news.set()

    def stop(self) -> None:
        self._is_done.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    def leave(self) -> None:
        """The run is over. Whoever holds the store goes last: others may still read from it."""
        self._ask(lambda store: store.set(f"left/{self.rank}", ""))
        self._stay_for("left", 5.0)

    def linger(self) -> None:
        """Something has failed. Whoever holds the store stays until the others have read it."""
        self._stay_for("heard", 2.0 + 2 * GLANCE)

    def _stay_for(self, key: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.rank == 0 and self.is_ours and time.monotonic() < end:
            others = [r for r, p in self.peers.items() if r and _life(p) in ("alive", "unknown")]
            if self._ask(lambda store, others=others: store.check([f"{key}/{r}" for r in others])):
                return
            time.sleep(0.02)

    def claim(self) -> bool:
        """Whether we are the first to fail, or nobody can say: then ours is what is printed."""
        found = self._ask(lambda store: store.compare_set("claim", "", str(self.rank)))
        return found is None or found.decode() == str(self.rank)

    def post(self, failure: ProcessFailure) -> None:
        self._ask(lambda store: store.set("failure", json.dumps(asdict(failure))))

    def posted(self) -> ProcessFailure | None:
        def read(store: Store) -> ProcessFailure | None:
            if not store.check(["failure"]):
                return None
            store.set(f"heard/{self.rank}", "")
            return ProcessFailure(**json.loads(store.get("failure")))

        return self._ask(read)

    def refresh(self) -> None:
        """Read it now, if it answers."""
        self._ask(lambda store: self.read())

    def gone(self) -> ProcessFailure | None:
        """A rank whose process has ended, as far as can be seen from here."""
        self.refresh()
        for rank, state in self.states().items():
            if state.order == 0 or (rank == 0 and self._is_lost and self.is_ours):
                peer = self.peers[rank]
                text = (
                    f"nothing has been heard of it for {clock(state.age)}"
                    if state.age is not None and _life(peer) == "unknown"
                    else "its process ended without a word, as after kill -9 or when a machine has "
                    "no memory left"
                )
                return ProcessFailure(
                    rank, "gone", f"{text}; it was last {_last(peer)}", time.time()
                )
        return None

    def states(self) -> dict[int, _State]:
        return {rank: self._state(rank) for rank in self.peers}

    def table(self, without: int = -1) -> dict[str, str]:
        """Who does what, for people; ranks that do the same are in one line.

        {"rank 1": "is sampling, step 12, since 0:42", "ranks 0, 2-3": "wait for ... since 0:31"}
        """
        groups: dict[tuple[str, str], list[tuple[int, _State]]] = {}
        for rank, state in sorted(self.states().items(), key=lambda item: item[1].order):
            if rank != without:
                groups.setdefault((state.one, state.rest), []).append((rank, state))
        told: dict[str, str] = {}
        if self._is_mute:
            told["the store"] = f"at {_address()} does not answer: what follows may be old"
        for (one, rest), members in groups.items():
            verb = one if len(members) == 1 else members[0][1].many
            ages = [state.age for _, state in members if state.age is not None]
            since = f" since {clock(max(ages))}" if ages else ""
            told[ranks_in_words([rank for rank, _ in members])] = f"{verb} {rest}{since}".strip()
        return told

    def is_told_by_a_lower_rank(self, wait: Wait) -> bool:
        """Of those who wait for the same thing the first speaks, if it still can."""
        states = [self._state(rank) for rank in range(self.rank)]
        return not self._is_mute and any(state.waits_for == wait.what for state in states)

    def _state(self, rank: int) -> _State:
        peer = self.peers[rank]
        if not peer.host and not self._has_come(rank):
            return _State("has", "have", "not come yet", order=1)
        if rank == self.rank:
            return self._as_told(self._own_report(), 0.0)
        life = _life(peer)
        # as far as we could hear it: the store may be the one that is silent
        silent = (self._read_at or time.monotonic()) - peer.heard
        place = f"(pid {peer.pid} on {peer.host})"
        last = f"; it was last {_last(peer)}"
        if life == "gone":
            return _State("is", "are", f"gone {place}{last}", order=0)
        if life == "stopped":
            return _State("is", "are", f"stopped by a signal {place}{last}", order=1)
        if silent > self.patience:
            order = 0 if life == "unknown" else 1
            return _State("has", "have", f"not reported {place}{last},", silent, order=order)
        return self._as_told(peer.report, time.monotonic() - peer.heard)

    def _as_told(self, report: dict[str, Any], age: float) -> _State:
        what, waits = report.get("waits_for", ""), report.get("waits", 0.0) + age
        if report.get("is_together"):
            return _State("waits", "wait", f"for {what}", waits, what)
        within = f" (waiting {clock(waits)} for {what})" if what else ""
        phase = report.get("phase", "starting")
        return _State("is", "are", f"{phase}{within},", report.get("for", 0.0) + age, order=2)

    def _own_report(self) -> dict[str, Any]:
        phase, since = self.phase
        report: dict[str, Any] = {"phase": phase, "for": time.monotonic() - since}
        block, waits = self.block, current()
        if block is not None or waits:
            wait = block or waits[0]
            report |= {"waits_for": wait.what, "waits": wait.age, "is_together": block is not None}
        return report

    def _keep(self) -> None:
        """Write and read the board until the end; whether somebody has failed is asked more often."""
        next_beat = 0.0
        while not self._is_done.wait(min(GLANCE, self.beat)):
            if not self._is_lost:
                try:
                    if self._has_news.is_set() or time.monotonic() > next_beat:
                        self._has_news.clear()
                        next_beat = time.monotonic() + self.beat
                        self._write()
                        self.read()
                    self._look_for_failure()
                except RuntimeError:
                    self._is_lost = True  # rank 0 or torchrun is gone; who needs them will notice
            block = self.block
            if self.on_late and block is not None and block.age > self.deadline + self.beat:
                self.on_late(block)

    def _write(self) -> None:
        assert self._store is not None
        self._count += 1
        report = {"count": self._count, **self._own_report()}
        self._store.set(f"report/{self.rank}", json.dumps(report))

    def read(self) -> None:
        """What the others have written."""
        store = self._store
        assert store is not None
        texts = store.multi_get([f"report/{rank}" for rank in self.peers])
        for peer, text in zip(self.peers.values(), texts, strict=True):
            report = json.loads(text)
            if report["count"] != peer.report.get("count"):
                peer.report, peer.heard = report, time.monotonic()
        self._read_at = time.monotonic()

    def _look_for_failure(self) -> None:
        assert self._store is not None
        if self.on_failure is not None and self._store.check(["failure"]):
            tell, self.on_failure = self.on_failure, None
            self._store.set(f"heard/{self.rank}", "")
            tell(ProcessFailure(**json.loads(self._store.get("failure"))))

    def _ask(self, question: Callable[[Store], Any]) -> Any:
        """The store's answer; None if it does not answer, and then it is not asked again."""
        store = self._store
        if store is None or self._is_lost or self._is_deaf:
            return None
        try:
            return within(2.0, lambda: question(store))
        except TimeoutError:
            self._is_deaf = True
        except RuntimeError:
            self._is_lost = True
        return None


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """The call's result; TimeoutError if it takes longer, while a thread goes on waiting for it."""
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


def _last(peer: _Peer) -> str:
    """Behind "it was last"."""
    report = peer.report
    if report.get("is_together"):
        return f"waiting for {report['waits_for']}"
    return report.get("phase", "starting")


def ranks_in_words(ranks: Sequence[int]) -> str:
    """[1] -> rank 1; [0, 1, 2, 5] -> ranks 0-2, 5."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    told = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {told}" if len(ranks) == 1 else f"ranks {told}"


def _stat(pid: int) -> list[str]:
    """Fields of Linux's /proc/PID/stat behind the name, which may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    except OSError:
        return []


def _born(pid: int) -> str:
    fields = _stat(pid)
    return fields[19] if fields else ""


def _space() -> str:
    """Two processes with the same text see each other's pids; empty: nobody can say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _life(peer: _Peer) -> str:
    """gone, stopped, alive; or unknown, on another machine."""
    if not peer.born or peer.space != _space():
        return "unknown"
    fields = _stat(peer.pid)
    if not fields or fields[0] in "ZX" or fields[19] != peer.born:
        return "gone"
    return "stopped" if fields[0] == "T" else "alive"


def number_in(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdigit():
        raise ValueError(
            f"RANK is set, but {name} is {text!r}; start the processes with torchrun, which sets all "
            "of them, or unset RANK to run alone"
        )
    return int(text)
