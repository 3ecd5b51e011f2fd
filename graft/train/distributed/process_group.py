"""The processes of one run, as torchrun starts them, and their collective operations.

    torchrun --nproc-per-node 2 -m graft train RECIPE

    rank 0   processes.gather(3, "the lengths of step 12")  -> [3, 5]
    rank 1   processes.gather(5, "the lengths of step 12")  -> [3, 5]

Every operation has a name and a deadline; what a process prints that waits for long is in `heartbeat`, how a
failure of one rank ends all of them in `failures`.
"""

from __future__ import annotations

import atexit
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh

from graft.deadlines import Watchdog, skip_frames_in, waiting
from graft.engine.engine_group import EngineGroup
from graft.train.distributed.failures import FailureHandler, describe, is_broken_link, to_stderr
from graft.train.distributed.heartbeat import (
    ProcessesLost,
    ProcessFailure,
    RankHeartbeat,
    launch_variable,
)
from graft.train.distributed.stores import keep_local
from graft.train.processes import Processes
from graft.trust.restricted_pickle import dumps, loads

skip_frames_in(__file__)

BUCKET = 256 * 2**20
"""Bytes that are summed in one operation: large enough for a link, small beside a model."""
ALONE_WAITS = 60.0
"""Seconds after which a process without others prints what it waits for."""
NCCL_MARGIN = 60.0
"""Seconds that NCCL waits beyond our deadline: it ends a process without naming who is late."""


class ProcessGroup(Processes):
    """This process among those of its run. A single process has no torch group."""

    def __init__(self, deadline: float, device: torch.device) -> None:
        super().__init__()
        self.deadline, self.device = deadline, device
        self._heartbeat: RankHeartbeat | None = None
        self._failures: FailureHandler | None = None
        self._resources = ExitStack()

    @classmethod
    def start(
        cls,
        deadline: float,
        device: torch.device | str,
        note: Callable[[str], None] = to_stderr,
    ) -> ProcessGroup:
        """Connect to the other processes, if torchrun has started any; `note` prints long waits."""
        found = cls(deadline, torch.device(device))
        if "RANK" in os.environ:
            found.rank, found.world = int(os.environ["RANK"]), int(launch_variable("WORLD_SIZE"))
        if found.world == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
            found._resources.enter_context(Watchdog(note, after=ALONE_WAITS))
            return found
        if found.device.type == "cuda":
            found.device = _own_gpu(int(launch_variable("LOCAL_RANK")))
        try:
            found._connect(note)
        except BaseException:
            found._release()
            raise
        return found

    @property
    def failure(self) -> ProcessFailure | None:
        """Why another rank has ended, once it is known: collective operations are then impossible."""
        return None if self._failures is None else self._failures.known

    def doing(self, phase: str) -> None:
        """Report what this process does, such as "sampling, step 12"."""
        if self._heartbeat is not None:
            self._heartbeat.set_phase(phase)

    # collective operations

    def gather(self, value: Any, what: str) -> list[Any]:
        if self._heartbeat is None:
            return super().gather(value, what)
        with self.together(what):
            payload = dumps(value)
            longest = int(self._agree(what, len(payload)))
            # a pickle ends with a mark, so the padding behind it is not read
            return [loads(part) for part in self._exchange(payload, longest)]

    def share(self, value: Any, what: str) -> Any:
        """Rank 0's value, on all ranks."""
        if self._heartbeat is None:
            return value
        with self.together(what):
            payload = dumps(value) if self.is_first else b""
            size = int(self._agree(what, len(payload)))
            sent = torch.empty(size, dtype=torch.uint8)
            if self.is_first:
                sent.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
            self._finish(dist.broadcast(sent, src=0, async_op=True))
            return value if self.is_first else loads(sent.numpy().tobytes())

    def add(self, tensors: Iterable[Tensor], what: str) -> None:
        tensors = list(tensors)
        if self._heartbeat is None or not tensors:
            return
        shapes = str([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
        with self.together(what), torch.no_grad():
            self._agree(what, 0.0, shapes)
            for bucket in _buckets(tensors):
                if len(bucket) == 1 and bucket[0].is_contiguous():  # needs no copy
                    self._finish(dist.all_reduce(bucket[0], async_op=True))
                    continue
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                self._finish(dist.all_reduce(flat, async_op=True))
                sizes = [tensor.numel() for tensor in bucket]
                for tensor, part in zip(bucket, flat.split(sizes), strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def max_over_ranks(self, number: float, what: str) -> float:
        if self._heartbeat is None:
            return super().max_over_ranks(number, what)
        with self.together(what):
            return self._agree(what, number)

    def mesh(self, tp: int) -> DeviceMesh:
        """The ranks as a table with the dimensions "dp" and "tp": with tp=2 [[0, 1], [2, 3], ...]."""
        table = self._in_rows(tp, "parallel.tp")
        if self._heartbeat is None and not dist.is_initialized():
            # a mesh consists of process groups, so make one of a single process
            dist.init_process_group(self._backend, store=HashStore(), rank=0, world_size=1)
            self._resources.callback(dist.destroy_process_group)
        self._tp = tp
        with self.together("the groups of the device mesh"):
            # made here: the groups that a mesh makes would wait for half an hour
            groups = []
            for rows in (table.T.tolist(), table.tolist()):
                group, _ = dist.new_subgroups_by_enumeration(rows, timeout=self._group_timeout)
                groups.append(group)
        return DeviceMesh.from_group(groups, self.device.type, table, mesh_dim_names=("dp", "tp"))

    def engine_group(self, size: int) -> EngineGroup | None:
        """The processes of this one's engine, `size` neighbours: of 4 with size 2 [0, 1] and [2, 3].

        None: an engine of its own.
        """
        if size == 1:
            return None
        rows = self._in_rows(size, "engine.tp").tolist()
        with self.together("the groups of the engines"):
            group, _ = dist.new_subgroups_by_enumeration(rows, timeout=self._group_timeout)
        assert isinstance(group, dist.ProcessGroup)  # every rank is in one of the rows
        return EngineGroup(group, rows[self.rank // size], self._finish)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Name the collective operations of the block; if connections break or time runs out, report why.

        For operations that torch starts: `with processes.together("the gradients of step 12"):
        loss.backward()`. Other errors pass through unchanged.
        """
        heartbeat, failures = self._heartbeat, self._failures
        if heartbeat is None or failures is None:
            yield
            return
        if failures.known is not None:
            raise ProcessesLost(f"{what} failed: {failures.known}", failures.known)
        with waiting(what, self.deadline) as wait:
            outer, heartbeat.collective = heartbeat.collective, wait
            try:
                yield
            except ProcessesLost:
                raise
            except RuntimeError as error:
                if not is_broken_link(error):
                    raise
                raise failures.explain(error, what) from error
            finally:
                heartbeat.collective = outer

    # the end of a run

    @contextmanager
    def guarded(self, describe: Callable[[BaseException], str] = describe) -> Iterator[None]:
        """Guard a whole run, outside of what draws on the screen: every failure ends all processes.

        An exception ends this process with exit code 1, after `describe` of it has been printed and
        posted for the others. Code inside must not wait for the others while it cleans up. An
        interruption is not a failure and passes through.
        """
        if self._failures is None:
            yield
            return
        with self._failures.guarded(describe):
            yield

    def close(self) -> None:
        """Leave together at the end of the run."""
        if self._heartbeat is not None:
            self.barrier("the end of the run")
            self._heartbeat.stop()
            self.barrier("the last heartbeat")  # rank 0 may hold the store that they use
        self._release()

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close() if kind is None else self._release()

    def _release(self) -> None:
        atexit.unregister(self._release)
        self._resources.close()
        self._heartbeat, self._failures = None, None

    # underneath

    def _in_rows(self, size: int, key: str) -> Tensor:
        """The ranks as a table of `size` columns."""
        if self.world % size:
            fit = ", ".join(str(n) for n in range(1, self.world + 1) if self.world % n == 0)
            raise ValueError(
                f"{key}={size} does not divide the {self.world} processes of this run; possible here: {fit}"
            )
        return torch.arange(self.world).view(-1, size)

    @property
    def _backend(self) -> str:
        return "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"

    @property
    def _group_timeout(self) -> timedelta:
        margin = NCCL_MARGIN if self.device.type == "cuda" else 0.0
        return timedelta(seconds=self.deadline + margin)

    def _connect(self, note: Callable[[str], None]) -> None:
        heartbeat = RankHeartbeat(self.rank, self.world, self.deadline)
        watchdog = Watchdog(
            note,
            after=min(30.0, self.deadline / 4),
            name=f"rank {self.rank}",
            peers=lambda: heartbeat.table(without=self.rank),
            is_reported_elsewhere=heartbeat.is_reported_by_lower_rank,
        )
        self._resources.enter_context(watchdog)
        atexit.register(self._release)
        with waiting("the other processes to start", self.deadline):
            heartbeat.join()
        self._heartbeat = heartbeat
        self._failures = failures = FailureHandler(heartbeat, self._release)
        heartbeat.on_failure = failures.on_failure
        heartbeat.on_late = failures.on_late if self.device.type == "cuda" else None
        if (warning := keep_local()) and self.is_first:
            note(f"warning: {warning}")
        with self.together("the connections between the processes"):
            dist.init_process_group(
                self._backend,
                store=PrefixStore("torch", heartbeat.connect()),
                rank=self.rank,
                world_size=self.world,
                timeout=self._group_timeout,
            )
        self._resources.callback(dist.destroy_process_group)
        heartbeat.start()
        self._resources.callback(heartbeat.stop)

    def _agree(self, what: str, number: float, detail: str = "") -> float:
        """The largest number of all ranks, after a check that all are in the same operation."""
        key = float(zlib.crc32((what + detail).encode()))
        sent = torch.tensor([number, key, -key], dtype=torch.float64)
        self._finish(dist.all_reduce(sent, dist.ReduceOp.MAX, async_op=True))
        if sent[1] == -sent[2]:
            return sent[0].item()
        parts = self._exchange(f"{what} {detail}".encode()[:400], 400)
        names = [part.rstrip(b" \0").decode(errors="replace") for part in parts]
        listed = "; ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
        raise RuntimeError(f"the processes are in different operations: {listed}")

    def _exchange(self, payload: bytes, size: int) -> list[bytes]:
        """The payloads of all ranks, each padded with zeros to `size` bytes."""
        sent = torch.zeros(size, dtype=torch.uint8)
        sent[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        parts = [torch.empty_like(sent) for _ in range(self.world)]
        self._finish(dist.all_gather(parts, sent, async_op=True))
        return [part.numpy().tobytes() for part in parts]

    def _finish(self, work: Any) -> None:
        """Poll instead of waiting inside the library, where Ctrl-C and our deadline have no effect."""
        begin, pause = time.monotonic(), 20e-6
        while not work.is_completed():
            if (failure := self.failure) is not None:
                raise ProcessesLost(f"{failure}", failure)
            # gloo keeps the deadline; NCCL is given longer
            if time.monotonic() - begin > self.deadline + 1.0:
                raise RuntimeError("Timed out waiting for the other processes (gloo or NCCL)")
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)
        work.wait()


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
    """Tensors of one type and device, in lists that are not much larger than BUCKET bytes."""
    pending: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        pending.setdefault(kind, []).append(tensor)
        sizes[kind] = sizes.get(kind, 0) + tensor.numel() * tensor.element_size()
        if sizes[kind] >= BUCKET:
            yield pending.pop(kind)
            del sizes[kind]
    yield from pending.values()


ALONE = ProcessGroup(600.0, torch.device("cpu"))
"""A run of one process."""
