"""The processes of one run, as torchrun starts them: who we are, what we do together, who failed.

    torchrun --nproc-per-node 2 -m graft train RECIPE

    rank 0   processes.gather(3, "the lengths of step 12")  -> [3, 5]
    rank 1   processes.gather(5, "the lengths of step 12")  -> [3, 5]

Whatever they do together has a name and a deadline. Every few seconds each process writes what it is
about to the store that connects them, and whoever waits for long can therefore say

    rank 0 waits for the lengths of step 12 since 0:31, in graft/train/rl.py:80
    rank 1 is sampling, step 12, since 0:42

An error is printed by the rank that has it, then put in the store, then its process ends. The others,
whose connections break by that, find it there and end with one line: the cause is what is read first.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh

from graft.deadlines import Wait, Watchdog, pass_over, waiting
from graft.train.distributed.heartbeat import (
    ProcessesLost,
    ProcessFailure,
    RankHeartbeat,
    number_in,
    ranks_in_words,
    within,
)

pass_over(__file__)

BUCKET = 256 * 2**20
"""Bytes that are summed in one go: large enough for a link, small beside a model."""
GRACE = 10.0
"""Seconds that a process has to end by itself when another has failed."""
ALONE_WAITS = 60.0
"""Seconds after which a process without others tells what it waits for, such as a slow step ahead."""
NCCL_MARGIN = 60.0
"""Seconds that NCCL waits beyond our deadline: it ends a process without a word of who waits."""


def describe(error: BaseException) -> str:
    """The text of an error of ours; of any other also its traceback."""
    text = f"{error}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parents[2])
    is_plain = isinstance(error, ValueError | ImportError | OSError)
    if type(error).__module__.startswith("graft.") or (
        is_plain and frames and frames[-1].filename.startswith(ours)
    ):
        return text
    told = "".join(traceback.format_exception(error)).rstrip()
    return f"{type(error).__name__}: {text}\n{told}"


def to_stderr(text: str) -> None:
    sys.stderr.write(f"graft: {text}\n".replace("\n", "\n       ").rstrip(" "))
    sys.stderr.flush()


class ProcessGroup:
    """This process among those of its run. Alone it has no process group, and all is trivial."""

    def __init__(self, deadline: float, device: torch.device) -> None:
        self.rank = 0
        self.world = 1
        self.local_rank = 0
        self.deadline = deadline
        self.device = device
        self._tp = 1
        self._board: RankHeartbeat | None = None
        self._watchdog: Watchdog | None = None
        self._owns_group = False
        self._is_guarded = False
        self._is_ending = False
        self._known: ProcessFailure | None = None
        """A failure of somebody else, once we have heard of it."""

    @classmethod
    def start(
        cls,
        deadline: float,
        device: torch.device | str,
        say: Callable[[str], None] = to_stderr,
    ) -> ProcessGroup:
        """Meet the other processes, if torchrun has started any; `say` is told of long waits."""
        found = cls(deadline, torch.device(device))
        under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        if "RANK" not in os.environ or (number_in("WORLD_SIZE") == 1 and not under_torchrun):
            found._watchdog = Watchdog(say, after=ALONE_WAITS, every=ALONE_WAITS)
            found._watchdog.start()
            return found
        found.rank, found.world = number_in("RANK"), number_in("WORLD_SIZE")
        found.local_rank = number_in("LOCAL_RANK")
        if found.device.type == "cuda":
            found.device = _own_gpu(found.local_rank)
        try:
            found._meet_the_others(say)
        except BaseException:
            found._let_go()
            raise
        return found

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def dp_rank(self) -> int:
        """Which group of the batch's: rank 5 of 8 with tp=2 is (dp 2, tp 1)."""
        return self.rank // self._tp

    @property
    def dp_size(self) -> int:
        return self.world // self._tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self._tp

    @property
    def tp_size(self) -> int:
        return self._tp

    @property
    def failure(self) -> ProcessFailure | None:
        """Why others have ended, if we have heard that they did: nothing can be done together."""
        return self._known

    def doing(self, phase: str) -> None:
        """What this process is about, such as "sampling, step 12": others are told, if they wait."""
        if self._board is not None:
            self._board.tell(phase)

    # what they do together

    def gather(self, value: Any, what: str) -> list[Any]:
        """Everybody's value, by rank. Any object that can be pickled."""
        if self._board is None:
            return [value]
        with self.together(what):
            payload = pickle.dumps(value)
            longest = int(self._agree(what, len(payload)))
            sent = torch.zeros(8 + longest, dtype=torch.uint8)
            sent[:8] = torch.frombuffer(
                bytearray(len(payload).to_bytes(8, "little")), dtype=torch.uint8
            )
            sent[8 : 8 + len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            parts = [torch.empty_like(sent) for _ in range(self.world)]
            self._finish(dist.all_gather(parts, sent, async_op=True))
            texts = [part.numpy().tobytes() for part in parts]
            return [
                pickle.loads(text[8 : 8 + int.from_bytes(text[:8], "little")]) for text in texts
            ]

    def share(self, value: Any, what: str) -> Any:
        """Rank 0's value, for all."""
        if self._board is None:
            return value
        with self.together(what):
            payload = pickle.dumps(value) if self.is_first else b""
            size = int(self._agree(what, len(payload)))
            sent = torch.empty(size, dtype=torch.uint8)
            if self.is_first:
                sent.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
            self._finish(dist.broadcast(sent, src=0, async_op=True))
            return value if self.is_first else pickle.loads(sent.numpy().tobytes())

    def add(self, tensors: Iterable[Tensor], what: str) -> None:
        """Sum over all ranks, in place; everybody gives tensors of the same shapes."""
        tensors = list(tensors)
        if self._board is None or not tensors:
            return
        shapes = str([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
        with self.together(what), torch.no_grad():
            self._agree(what, 0.0, shapes)
            for bucket in _buckets(tensors):
                flat = (
                    bucket[0].view(-1)
                    if _is_flat(bucket)
                    else torch.cat([t.reshape(-1) for t in bucket])
                )
                self._finish(dist.all_reduce(flat, async_op=True))
                if not _is_flat(bucket):
                    sizes = [tensor.numel() for tensor in bucket]
                    for tensor, part in zip(bucket, flat.split(sizes), strict=True):
                        tensor.copy_(part.view(tensor.shape))

    def most(self, number: float, what: str) -> float:
        """The largest of everybody's numbers."""
        if self._board is None:
            return number
        with self.together(what):
            return self._agree(what, number)

    def any(self, flag: bool, what: str) -> bool:
        """Whether it is so for anybody."""
        return self.most(float(flag), what) > 0

    def barrier(self, what: str) -> None:
        """Go on when everybody has come here."""
        self.most(0.0, what)

    def mesh(self, tp: int) -> DeviceMesh:
        """The ranks as a table with the dimensions "dp" and "tp": with tp=2 [[0, 1], [2, 3], ...]."""
        if self.world % tp:
            fit = ", ".join(str(n) for n in range(1, self.world + 1) if self.world % n == 0)
            raise ValueError(
                f"parallel.tp={tp} does not divide the {self.world} processes of this run; "
                f"possible here: {fit}"
            )
        if self._board is None and not dist.is_initialized():
            # a mesh is made of process groups, so one of a single process, which nobody can join
            dist.init_process_group(self._backend, store=HashStore(), rank=0, world_size=1)
            self._owns_group = True
        self._tp = tp
        table = torch.arange(self.world).view(-1, tp)
        with self.together("the groups of the device mesh"):
            # made by hand: those that a mesh makes for itself would wait for half an hour
            groups = []
            for rows in (table.T.tolist(), table.tolist()):
                group, _ = dist.new_subgroups_by_enumeration(rows, timeout=self._group_timeout)
                groups.append(group)
        return DeviceMesh.from_group(groups, self.device.type, table, mesh_dim_names=("dp", "tp"))

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Name what is waited for in the block; if connections break or time runs out, say why.

        For what torch does together by itself: `with processes.together("the gradients of step 12"):
        loss.backward()`. An error in it that is not of that kind goes through as it is.
        """
        board = self._board
        if board is None:
            yield
            return
        if self._known is not None:
            raise ProcessesLost(f"{what} cannot be: {self._known}", self._known)
        with waiting(what, self.deadline) as wait:
            outer, board.block = board.block, wait
            try:
                yield
            except ProcessesLost:
                raise
            except RuntimeError as error:
                if not _is_broken_link(error):
                    raise
                raise self._explain(error, what) from error
            finally:
                board.block = outer

    # how they end

    @contextmanager
    def guarded(self, describe: Callable[[BaseException], str] = describe) -> Iterator[None]:
        """Around a whole run, outside of what draws on the screen: no failure goes unheard.

        An exception ends this process here, with exit code 1, after `describe` of it has been printed
        and the others told. What is inside must not wait for the others while it cleans up. An
        interruption is no failure, and goes through.
        """
        if self._board is None:
            yield
            return
        self._is_guarded = True
        try:
            yield
        except KeyboardInterrupt:
            if self._board is None:  # closed inside
                raise
            failure = self._posted(patience=0.5)
            if failure is None:
                self._board.post(ProcessFailure(self.rank, "interrupted", "", time.time()))
            elif failure.kind != "interrupted":
                self._stop_because(failure)
            raise
        except Exception as error:
            if self._board is None:
                raise
            self._fail(error, describe)
        finally:
            self._is_guarded = False

    def close(self) -> None:
        """The run is over for everybody: leave together."""
        if self._board is not None:
            self.barrier("the end of the run")
            self._board.stop()
            self._board.leave()
        self._let_go()

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close() if kind is None else self._let_go()

    def _let_go(self) -> None:
        atexit.unregister(self._let_go)
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._board is not None:
            self._board.stop()
            self._owns_group = True
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._board, self._watchdog, self._owns_group = None, None, False

    # underneath

    @property
    def _backend(self) -> str:
        return "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"

    @property
    def _group_timeout(self) -> timedelta:
        margin = NCCL_MARGIN if self.device.type == "cuda" else 0.0
        return timedelta(seconds=self.deadline + margin)

    def _meet_the_others(self, say: Callable[[str], None]) -> None:
        board = RankHeartbeat(self.rank, self.world, self.deadline)
        patience = min(30.0, self.deadline / 4)
        self._watchdog = Watchdog(
            say,
            after=patience,
            every=patience,
            name=f"rank {self.rank}",
            peers=lambda: board.table(without=self.rank),
            told_elsewhere=board.is_told_by_a_lower_rank,
        )
        self._watchdog.start()
        atexit.register(self._let_go)
        with waiting("the other processes to start", self.deadline):
            board.meet()
        self._board = board
        board.on_failure = self._hear
        board.on_late = self._enforce if self.device.type == "cuda" else None
        with self.together("the connections between the processes"):
            dist.init_process_group(
                self._backend,
                store=PrefixStore("torch", board.connect()),
                rank=self.rank,
                world_size=self.world,
                timeout=self._group_timeout,
            )
        board.start()

    def _agree(self, what: str, number: float, detail: str = "") -> float:
        """The largest of everybody's numbers, once it is sure that all mean the same `what`."""
        key = float(zlib.crc32((what + detail).encode()))
        sent = torch.tensor([number, key, -key], dtype=torch.float64)
        self._finish(dist.all_reduce(sent, dist.ReduceOp.MAX, async_op=True))
        if sent[1] == -sent[2]:
            return sent[0].item()
        mine = (what + " " + detail if detail else what).encode()[:400].ljust(400)
        parts = [torch.empty(400, dtype=torch.uint8) for _ in range(self.world)]
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        self._finish(dist.all_gather(parts, own, async_op=True))
        said = [part.numpy().tobytes().decode(errors="replace").strip() for part in parts]
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said))
        raise RuntimeError(f"the processes are not at the same place of the run: {listed}")

    def _finish(self, work: Any) -> None:
        """Wait by looking, not inside the library, where neither Ctrl-C nor our deadline reaches."""
        begin, pause = time.monotonic(), 20e-6
        while not work.is_completed():
            if self._known is not None:
                raise ProcessesLost(f"{self._known}", self._known)
            # gloo keeps the deadline by itself; NCCL is given longer
            if time.monotonic() - begin > self.deadline + 1.0:
                raise RuntimeError("Timed out waiting for the other processes (gloo or NCCL)")
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)
        work.wait()

    def _explain(self, error: BaseException, what: str) -> ProcessesLost:
        """Who is to blame that something broke: one that failed, one that is gone, one that is late."""
        assert self._board is not None
        is_late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        failure = self._posted(0.5 if is_late else self._board.patience, or_gone=True)
        if failure is not None:
            return ProcessesLost(f"{what} cannot be: {failure}", failure)
        self._board.refresh()
        states = self._board.states()
        came = {rank for rank, state in states.items() if state.waits_for == what}
        missing = [rank for rank in states if rank not in came | {self.rank}]
        told = "".join(f"\n{who} {does}" for who, does in self._board.table().items())
        if not is_late:
            seen = str(error).partition("\n")[0]
            return ProcessesLost(f"the connections broke at {what} ({seen}).{told}")
        if missing:
            who = f"{ranks_in_words(missing)} did not come"
        else:
            who = "although all say that they wait for it: the network between them may be at fault"
        return ProcessesLost(
            f"waited {self.deadline:g} s for {what}, and {who}. If that was honest work, raise "
            f"parallel.deadline.{told}"
        )

    def _posted(self, patience: float, or_gone: bool = False) -> ProcessFailure | None:
        """What somebody else has put in the store; or who is gone without having put anything."""
        assert self._board is not None
        end = time.monotonic() + patience
        while True:
            found = self._known or self._board.posted()
            if found is None and or_gone and (gone := self._board.gone()) is not None:
                found = self._board.posted() or gone  # it may have told us just before
            if found is not None or time.monotonic() > end:
                return found
            time.sleep(0.05)

    def _fail(self, error: BaseException, describe: Callable[[BaseException], str]) -> NoReturn:
        self._begin_to_end()
        board = self._board
        assert board is not None
        if _is_broken_link(error):
            error = self._explain(error, "what the processes do together")
        is_lost = isinstance(error, ProcessesLost)
        cause = error.cause if isinstance(error, ProcessesLost) else None
        if cause is not None and cause.kind != "gone":
            self._stop_because(cause)
        text = describe(error)
        mine = cause or ProcessFailure(self.rank, "failed", text.partition("\n")[0], time.time())
        before = None if board.claim() else self._posted(patience=2.0)
        if before is None:
            host = board.peers[mine.rank].host
            what = f"is gone: {mine.text}" if mine.kind == "gone" else f"failed: {text}"
            to_stderr(f"rank {mine.rank} of {self.world} on {host} {what}")
            board.post(mine)
            _write_error_file(text, mine.at)
            self._leave()
        if not is_lost and mine.text != before.text:
            to_stderr(f"rank {self.rank} failed too: {mine.text}")
        self._stop_because(before)

    def _stop_because(self, failure: ProcessFailure) -> NoReturn:
        self._begin_to_end()
        text = f"rank {self.rank} stops, because {failure}"
        to_stderr(text)
        # torchrun takes the earliest for the cause, to the second
        _write_error_file(text, max(time.time(), failure.at + 1))
        self._leave()

    def _begin_to_end(self) -> None:
        self._is_ending = True
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it takes seconds, and has to be finished

    def _leave(self) -> NoReturn:
        """End now: threads and connections that hang are no reason to stay."""
        assert self._board is not None
        self._board.linger()
        atexit.unregister(self._let_go)
        with suppress(TimeoutError, Exception):
            within(3.0, atexit._run_exitfuncs)  # sandboxes and workers have to be closed
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)

    def _hear(self, failure: ProcessFailure) -> None:
        """By the thread that reads the store: somebody has failed while we are busy."""
        self._known = failure
        if self._is_ending or not self._is_guarded:
            return
        if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.SIG_DFL, None):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        end = time.monotonic() + GRACE
        while self._is_guarded and not self._is_ending and time.monotonic() < end:
            time.sleep(0.05)
        if self._is_guarded and not self._is_ending:  # it sits where no signal reaches
            self._stop_because(failure)

    def _enforce(self, wait: Wait) -> None:
        """By the same thread: NCCL hangs past the deadline, where no exception can be raised."""
        if self._is_guarded and not self._is_ending:
            self._fail(self._explain(TimeoutError("timed out"), wait.what), describe)


def _own_gpu(local_rank: int) -> torch.device:
    seen = torch.cuda.device_count()
    if local_rank >= seen:
        raise ValueError(
            f"process {local_rank + 1} of this machine has no GPU of its own: torch sees {seen}; start "
            f"torchrun with --nproc-per-node {seen}, or use model.device=cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type and device, so many that a bucket is not much larger than BUCKET."""
    open_ones: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        open_ones.setdefault(kind, []).append(tensor)
        sizes[kind] = sizes.get(kind, 0) + tensor.numel() * tensor.element_size()
        if sizes[kind] >= BUCKET:
            yield open_ones.pop(kind)
            del sizes[kind]
    yield from open_ones.values()


def _is_flat(bucket: Sequence[Tensor]) -> bool:
    """One tensor in one piece of memory needs no copy."""
    return len(bucket) == 1 and bucket[0].is_contiguous()


LINK_ERRORS = ("gloo", "nccl", "connection closed by peer", "connection reset", "broken pipe")


def _is_broken_link(error: BaseException) -> bool:
    """torch has a class of its own for some of them only."""
    if isinstance(error, ProcessesLost) or not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(part in text for part in LINK_ERRORS)


def _write_error_file(text: str, at: float) -> None:
    """In the form in which torchrun lists the failures of its processes."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(at))}
        with suppress(OSError):
            content = {"message": {"message": text.partition("\n")[0], "extraInfo": extra}}
            Path(path).write_text(json.dumps(content), encoding="utf-8")


ALONE = ProcessGroup(600.0, torch.device("cpu"))
"""A run of one process: nothing to meet, nothing to wait for."""
