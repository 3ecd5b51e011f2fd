"""A function run by several processes at once, as ranks of one gloo group.

    with Processes(2) as pair:
        assert pair.run(double, 21) == [42, 42]      # double(21), in each of them

A group is kept for many calls, and its processes are forks of one that has imported torch. A call ends
with what all of them returned, with the first exception that any of them raised, or at its deadline;
after the latter two the whole group is killed, since the others may wait for ever for one of them,
and the next call starts a new one. Functions must be importable: no closures.
"""

from __future__ import annotations

import datetime
import multiprocessing
import pickle
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

DEADLINE = 60.0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class ChildFailed(AssertionError):
    """What went wrong in one of the processes, with its traceback."""


class Processes:
    """`count` processes that wait for functions to run."""

    def __init__(self, count: int, deadline: float = DEADLINE) -> None:
        self.count, self.deadline = count, deadline
        self._children: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, deadline: float | None = None) -> list:
        """What function(*args) returned in each process, by rank."""
        if not self._children:
            self._start()
        try:
            return self._call(function, args, deadline or self.deadline)
        except BaseException:
            self.close()
            raise

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], deadline: float) -> list:
        message = pickle.dumps((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        results: dict[int, Any] = {}
        until = time.monotonic() + deadline
        while len(results) < self.count:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ready = wait(waiting, timeout=max(until - time.monotonic(), 0.0))
            if not ready:
                late = [rank for rank in range(self.count) if rank not in results]
                raise ChildFailed(f"{function.__name__}: no answer of {late} in {deadline:g} s")
            failures: list[str] = []
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                results[rank], failure = self._receive(rank, function.__name__)
                failures += [failure] if failure else []
            if failures:
                raise ChildFailed("\n".join(failures))
        return [results[rank] for rank in range(self.count)]

    def _receive(self, rank: int, name: str) -> tuple[Any, str]:
        try:
            is_fine, result = pickle.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            self._children[rank].join(5)
            code = self._children[rank].exitcode
            return None, f"{name} in process {rank}: it ended with code {code} and no answer"
        return (result, "") if is_fine else (None, f"{name} in process {rank}:\n{result}")

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preloaded"])  # torch is imported once for all groups
        with tempfile.NamedTemporaryFile(prefix="graft-store-", delete=False) as file:
            self._store = file.name  # a port could be taken by another process, a file cannot
        for rank in range(self.count):
            mine, theirs = context.Pipe()
            child = context.Process(
                target=_serve,
                args=(theirs, rank, self.count, self._store, self.deadline),
                daemon=True,
            )
            child.start()
            theirs.close()
            self._children.append(child)
            self._pipes.append(mine)

    def close(self) -> None:
        """Kill them all; they hold no state to save."""
        for child in self._children:
            child.kill()
        for child in self._children:
            child.join(10)
        for pipe in self._pipes:
            pipe.close()
        if self._children:
            Path(self._store).unlink(missing_ok=True)
        self._children, self._pipes = [], []


def _serve(pipe: Connection, rank: int, count: int, store: str, deadline: float) -> None:
    is_ready = False
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:  # the process that started this one is gone
            return
        try:
            if not is_ready:
                _join(rank, count, store, deadline)
                warnings.simplefilter("error")  # as in the process that pytest runs in
                is_ready = True
            function, args = pickle.loads(message)
            answer = True, function(*args)
        except BaseException:
            answer = False, traceback.format_exc()
        # plain pickles: torch's own way to send a tensor needs the sender to live on
        pipe.send_bytes(pickle.dumps(answer))


def _join(rank: int, count: int, store: str, deadline: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=deadline),
    )
