"""Every new process of a call is approved by the host, so that all of them stay within its memory.

The kernel limits the address space of each process, but not their sum. A call may have M bytes: its
first process may use all of them. Before it forks, the kernel asks the host (a seccomp notification,
Linux 5.5); the host divides what is left among the processes and lowers their limits first:

    M = 100, one process that uses 20     limit 100
    it forks                              (100 - 20 - 20 - 4) / 2 = 28 more for each: limits 48 and 48
    the child ends                        limit 100 again, at the next check

The 4 are kernel memory: the buffers that the open files of the second process can have.
"""

from __future__ import annotations

import errno
import resource
import time

from . import kernel
from .usage import Process

CLONE_VM = 0x100
MEGABYTE = 1 << 20
EXECUTED = 8 * MEGABYTE
"""Assumed of a child that shares its parent's memory until it starts a program."""
SMALLEST = MEGABYTE
"""With less for each, a new process is refused."""
APPEARS = 0.02
"""Seconds after which an approved process that was not seen is taken to have ended."""


class Approval:
    """A process that may not be in the table yet."""

    __slots__ = ("bytes", "expires", "known", "parent")

    def __init__(self, parent: int, known: set[int], size: int) -> None:
        self.parent = parent
        self.known = known
        self.bytes = size
        self.expires = time.monotonic() + APPEARS

    def is_pending(self, processes: list[Process]) -> bool:
        for process in processes:
            if process.parent == self.parent and process.pid not in self.known:
                return False
        return time.monotonic() < self.expires


class ForkGate:
    """The notifications of one call."""

    def __init__(
        self, listener: int, memory: int, loaded: int, buffers: int, user: int | None
    ) -> None:
        """`buffers`: kernel memory that the open files of one process can take. `user`: the id of the
        call's processes, if it is not the host's own."""
        self.listener = listener
        self.user = user
        self.memory = memory
        self.loaded = loaded
        self.buffers = buffers
        self.approvals: list[Approval] = []
        self.is_divided = False

    def receive(self) -> tuple[int, int, bool]:
        """The identity of the waiting request, the thread that forks, and whether it shares its memory
        with the child. OSError if it has ended meanwhile."""
        request, thread, call, flags = kernel.receive(self.listener)
        is_clone = call == kernel.NUMBERS["clone"]
        shares = bool(flags & CLONE_VM) if is_clone else call == kernel.NUMBERS.get("vfork")
        return request, thread, shares

    def answer(self, request: int, refusal: int) -> None:
        """Let the call continue, or fail with this error number. OSError if its process has ended."""
        kernel.answer(self.listener, request, refusal)

    def admit(self, processes: list[Process], parent: int, *, shares_memory: bool) -> int:
        """0 if the process `parent` may have a child, else the error number."""
        forking = next((process for process in processes if process.pid == parent), None)
        if forking is None:
            return errno.EAGAIN
        self._forget(processes)
        used = [process.excess(self.loaded) for process in processes]
        child = EXECUTED if shares_memory else forking.excess(self.loaded)
        reserved = sum(approval.bytes + self.buffers for approval in self.approvals)
        reserved += self.buffers * len(processes)  # those of the first process are not counted
        left = self.memory - sum(used) - child - reserved
        share = left // (len(processes) + 1)
        if share < SMALLEST:
            return errno.ENOMEM
        self.is_divided = True
        self._limit(processes, used, share)
        # a thread of theirs may have allocated before its limit was lowered
        most = {process.pid: self._max_use(process.pid, share, process) for process in processes}
        child = child + share if shares_memory else most[parent]
        if sum(most.values()) + child + reserved > self.memory + SMALLEST:
            return errno.ENOMEM
        known = {process.pid for process in processes}
        self.approvals.append(Approval(parent, known, child))
        return 0

    def rebalance(self, processes: list[Process]) -> None:
        """Divide what is left again, after processes have grown or ended."""
        if not self.is_divided or not processes:
            return
        self._forget(processes)
        if self.approvals:
            return  # one that has not been seen yet must not get more than it was approved with
        used = [process.excess(self.loaded) for process in processes]
        left = self.memory - sum(used) - self.buffers * (len(processes) - 1)
        if left < 0:  # a child shares its parent's memory until it starts a program
            return
        self._limit(processes, used, left // len(processes))
        self.is_divided = len(processes) > 1

    def _forget(self, processes: list[Process]) -> None:
        self.approvals = [one for one in self.approvals if one.is_pending(processes)]

    def _limit(self, processes: list[Process], used: list[int], share: int) -> None:
        with kernel.acting_as(self.user):
            self._set_limits(processes, used, share)

    def _set_limits(self, processes: list[Process], used: list[int], share: int) -> None:
        for process, size in zip(processes, used, strict=True):
            limit = process.base(self.loaded) + size + share
            try:
                hard = resource.prlimit(process.pid, resource.RLIMIT_AS)[1]
                resource.prlimit(process.pid, resource.RLIMIT_AS, (min(limit, hard), hard))
            except ProcessLookupError:
                continue  # ended meanwhile

    def _max_use(self, pid: int, share: int, before: Process) -> int:
        """What the process may come to use under its new limit."""
        allowed = before.excess(self.loaded) + share
        try:
            return max(allowed, Process(pid).excess(self.loaded))
        except OSError:
            return 0
