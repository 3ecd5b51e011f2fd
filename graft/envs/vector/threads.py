"""A vector with a thread per env: for envs that wait, on tools, processes or servers.

Threads live as long as the vector. One that passes its deadline is left to itself: nobody waits for
it any more, its late answer is dropped, and a new thread takes its seat with a new env.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from graft.envs.vector.base import VectorEnv
from graft.envs.vector.jobs import SlotJob, late_text, lost
from graft.envs.vector.slot import EnvSlot

Outbox = SimpleQueue[tuple["SlotThread", Any]]

GOODBYE = 5.0  # seconds that close() gives envs to close


class SlotThread:
    """A thread that does the jobs of one seat, in order."""

    def __init__(self, index: int, seat: EnvSlot, outbox: Outbox) -> None:
        self.index = index
        self.seat = seat
        self.outbox = outbox
        self.inbox: SimpleQueue[SlotJob | None] = SimpleQueue()
        self.job: SlotJob | None = None
        self.deadline = 0.0
        name = f"graft-env-{index}"
        # daemon: a hanging env must not keep the program from ending
        self.thread = threading.Thread(target=self.work, name=name, daemon=True)
        self.thread.start()

    def work(self) -> None:
        while (job := self.inbox.get()) is not None:
            self.outbox.put((self, job.run_apart(self.seat)))
        self.seat.close()

    def give(self, job: SlotJob, seconds: float) -> None:
        self.job = job
        self.deadline = time.monotonic() + seconds
        self.inbox.put(job)

    def leave(self) -> None:
        """End the thread after the job it is at."""
        self.inbox.put(None)


class ThreadVector(VectorEnv):
    """Steps overlap: 16 envs that wait 100 ms answer together after 100 ms."""

    def __init__(self, seats: Sequence[EnvSlot], timeout: float | None = None) -> None:
        super().__init__([seat.recipe for seat in seats], seats[0].autoreset, timeout)
        self._outbox: Outbox = SimpleQueue()
        self._sitters = [SlotThread(i, seat, self._outbox) for i, seat in enumerate(seats)]
        # threads know nothing of the vector, so one that nobody holds any more can end them
        self._finalizer = weakref.finalize(self, dismiss, self._sitters)

    @property
    def envs(self) -> list[Any]:
        return [sitter.seat.env for sitter in self._sitters]

    def fork(self) -> ThreadVector:
        self._check_idle()
        twin = ThreadVector([sitter.seat.fork() for sitter in self._sitters], self.timeout)
        twin.is_started = self.is_started
        return twin

    def _submit(self, jobs: Mapping[int, SlotJob]) -> None:
        for index, job in jobs.items():
            self._sitters[index].give(job, self.timeout)

    def _collect(self, seconds: float) -> list[tuple[int, Any]]:
        now = time.monotonic()
        busy = [self._sitters[index] for index in list(self.pending)]
        until = min([now + seconds, *(one.deadline for one in busy if one.job)])
        done: list[tuple[int, Any]] = []
        wait = max(0.0, until - now)
        while True:
            try:
                sitter, result = self._outbox.get(timeout=wait)
            except Empty:
                break
            wait = 0.0  # take along what else has come by now
            if self._sitters[sitter.index] is sitter:  # and not one that was given up
                sitter.job = None
                done.append((sitter.index, result))
        now = time.monotonic()
        for sitter in busy:
            if sitter.job and sitter.deadline <= now:
                done += self._give_up(sitter, sitter.job)
        return done

    def _give_up(self, late: SlotThread, job: SlotJob) -> list[tuple[int, Any]]:
        """Seat a new env; the answer to the job that was late, if it can be given at once."""
        error = late_text(late.index, late.seat.recipe.env_id, job, self.timeout)
        late.leave()
        sitter = SlotThread(late.index, late.seat.successor(), self._outbox)
        self._sitters[late.index] = sitter
        if job.do == "step":  # the new thread answers, with the next episode if there is to be one
            sitter.give(SlotJob("recover", (error,)), self.timeout)
            return []
        return [(late.index, lost(job, error))]

    def _shut(self) -> None:
        self._finalizer()
        ends = time.monotonic() + GOODBYE
        for sitter in self._sitters:
            sitter.thread.join(max(0.0, ends - time.monotonic()))


def dismiss(sitters: list[SlotThread]) -> None:
    for sitter in sitters:
        sitter.leave()
