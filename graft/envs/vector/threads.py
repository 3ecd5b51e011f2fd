"""A vector with a thread per env: for envs that wait, on tools, processes or servers.

Threads live as long as the vector. One that passes its deadline is abandoned: its late result is
dropped, and a new thread takes over its slot with a new env.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from graft.envs.vector.base import VectorEnv
from graft.envs.vector.slot import EnvSlot, SlotRequest

ResultQueue = SimpleQueue[tuple["SlotThread", Any]]

CLOSE_SECONDS = 5.0
"""How long close() waits for the envs to close."""


class SlotThread:
    """A thread that carries out the requests to one slot, in order."""

    def __init__(self, index: int, slot: EnvSlot, results: ResultQueue) -> None:
        self.index = index
        self.slot = slot
        slot.catches = (
            BaseException,
        )  # Ctrl-C never arrives on this thread: the env raised it all
        self.results = results
        self.requests: SimpleQueue[SlotRequest | None] = SimpleQueue()
        self.running: SlotRequest | None = None
        self.deadline = 0.0
        name = f"graft-env-{index}"
        # daemon: a hanging env must not keep the program from ending
        self.thread = threading.Thread(target=self.work, name=name, daemon=True)
        self.thread.start()

    def work(self) -> None:
        while (request := self.requests.get()) is not None:
            self.results.put((self, request.run(self.slot)))
        self.slot.close()

    def submit(self, request: SlotRequest, seconds: float) -> None:
        self.running = request
        self.deadline = time.monotonic() + seconds
        self.requests.put(request)

    def stop(self) -> None:
        """End the thread after its running request."""
        self.requests.put(None)


class ThreadVector(VectorEnv):
    """Steps overlap: 16 envs that wait 100 ms answer together after 100 ms."""

    def __init__(self, slots: Sequence[EnvSlot], timeout: float | None = None) -> None:
        super().__init__(slots, timeout)
        self._results: ResultQueue = SimpleQueue()
        self._threads = [SlotThread(i, slot, self._results) for i, slot in enumerate(slots)]
        # threads do not refer to the vector, so that one without references can end them
        self._finalizer = weakref.finalize(self, stop_all, self._threads)

    def _submit(self, requests: Mapping[int, SlotRequest]) -> None:
        for index, request in requests.items():
            self._threads[index].submit(request, self.timeout)

    def _collect(self, seconds: float) -> list[tuple[int, Any]]:
        now = time.monotonic()
        busy = [self._threads[index] for index in list(self.pending)]
        until = min([now + seconds, *(one.deadline for one in busy if one.running)])
        done: list[tuple[int, Any]] = []
        wait = max(0.0, until - now)
        while True:
            try:
                thread, result = self._results.get(timeout=wait)
            except Empty:
                break
            wait = 0.0  # after the first result, only those that are there already
            if self._threads[thread.index] is thread:  # and not one that was abandoned
                thread.running = None
                done.append((thread.index, result))
        now = time.monotonic()
        for thread in busy:
            if thread.running and thread.deadline <= now:
                done += self._abandon(thread, thread.running)
        return done

    def _abandon(self, late: SlotThread, request: SlotRequest) -> list[tuple[int, Any]]:
        """Replace a late thread and its env; the result of its request, if there is one already."""
        error = (
            f"TimeoutError: env {late.index} ({late.slot.spec.env_id!r}) took more than "
            f"{self.timeout:g} s for a {request.method}"
        )
        late.stop()
        self.slots[late.index] = late.slot.successor()
        thread = SlotThread(late.index, self.slots[late.index], self._results)
        self._threads[late.index] = thread
        if request.method == "step":  # the new thread answers, after an autoreset if there is one
            thread.submit(SlotRequest("recover", (error,)), self.timeout)
            return []
        return [(late.index, request.failed(error))]

    def _shut(self) -> None:
        self._finalizer()
        ends = time.monotonic() + CLOSE_SECONDS
        for one in self._threads:
            one.thread.join(max(0.0, ends - time.monotonic()))


def stop_all(threads: list[SlotThread]) -> None:
    for thread in threads:
        thread.stop()
