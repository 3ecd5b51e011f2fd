"""The warm process: one fork per request.

A request is one byte on the socket with descriptors beside it: the job (a line of numbers, then
the code), what becomes stdin, stdout and stderr, a status socket, and for a session the socket it
is led by. The numbers are: 1 to echo the last value, then `Limits`. On the status socket the host
writes the exit code when the child has ended; when the caller hangs up there, the child is killed.
The host ends when its caller does.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import sys
from _socket import socket  # without the module around it, which is large
from typing import Any, NoReturn

from . import kernel, landlock, room, runner, usage
from .cell import Limits, Walls

STATE = 3  # the descriptor by which a session is led
SIGKILL = 9  # importing `signal` would make every fork a little dearer
MOST_FILES = 1 << 16
WATCH = 0.1  # seconds between two looks at the memory of calls that take long


class HostCall:
    """A child that has not ended yet."""

    __slots__ = ("head", "is_killed", "outgrew", "pid", "scratch", "slot", "status")

    def __init__(self, pid: int, slot: int, scratch: str | None, status: int, head: bytes) -> None:
        self.pid = pid
        self.slot = slot
        self.scratch = scratch
        self.status = status
        self.head = head
        """Its limits, read only if it lasts."""
        self.is_killed = False
        """Its caller has hung up."""
        self.outgrew = ""
        """The limit that the host had to enforce itself: "memory" or "disk"."""

    @property
    def limits(self) -> Limits:
        return Limits(*map(int, self.head.split()[1:]))


def main() -> None:
    config: dict[str, Any] = json.loads(sys.argv[2])
    sys.path[:] = [path for path in sys.path if path != sys.argv[1]] + config["site"]
    method = config["method"]
    own_pids = -1
    if method == "namespaces":
        is_root = room.is_privileged()
        room.leave_the_world(is_root)
        if keeper_of := os.fork():
            os.close(config["requests"])
            status = os.waitpid(keeper_of, 0)[1]
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        # the keeper has one thread, so this cannot fire early
        kernel.prctl(kernel.PR_SET_PDEATHSIG, SIGKILL)
        own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        room.furnish(config["readable"], config["links"])
    elif method == "bubblewrap":
        kernel.prctl(kernel.PR_SET_PDEATHSIG, SIGKILL)
        own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    elif method == "landlock":
        landlock.version()
    runner.prepare(config["preload"])
    walls = Walls(method, config["readable"], config["users"], config["scratch"])
    if method == "bubblewrap" and not walls.try_nesting(own_pids):
        walls.is_nested = False  # it may be the only program here that is allowed namespaces
        walls.has_landlock = landlock.is_there()
    host = ForkServer(walls, config["requests"], config["caller"], own_pids)
    try:
        host.serve()
    finally:
        for call in host.by_process.values():
            host.kill(call)
        if not walls.is_nested:
            _remove(walls.scratch)


class ForkServer:
    """Little is done here and in `become_cell` on purpose: after a fork every page that either
    process touches is copied, and that is most of what a call costs."""

    def __init__(self, walls: Walls, requests: int, caller: int, own_pids: int) -> None:
        self.walls = walls
        self.requests = socket(fileno=requests)
        self.caller = caller
        self.own_pids = own_pids
        self.by_status: dict[int, HostCall] = {}
        self.by_process: dict[int, HostCall] = {}  # the descriptor that tells when it has ended

    def serve(self) -> None:
        """Answer requests until the caller is gone."""
        self.walls.settle()
        gc.collect()
        gc.freeze()  # a collection in a child would touch every page of ours
        gc.disable()
        self.poll = poll = select.poll()
        requests, caller = self.requests.fileno(), self.caller
        poll.register(requests, select.POLLIN)
        if caller >= 0:
            poll.register(caller, select.POLLIN)
        self.requests.send(b"R")
        while True:
            events = poll.poll(WATCH * 1000 if self.by_process else None)
            for descriptor, _ in events:
                if descriptor == requests:
                    if not self.take():
                        return
                elif descriptor in self.by_process:
                    self.reap(descriptor)
                elif descriptor in self.by_status:  # the caller has hung up
                    self.by_status[descriptor].is_killed = True
                    self.kill(self.by_status[descriptor])
                    poll.unregister(descriptor)
                elif descriptor == caller:
                    return
            if not events:
                self.watch()

    def take(self) -> bool:
        """Start what the caller asks for; False if the caller has hung up."""
        _, beside, _, _ = self.requests.recvmsg(1, 64)
        if not beside:
            return False
        descriptors = memoryview(beside[0][2]).cast("i").tolist()
        job, status = descriptors[0], descriptors[4]
        slot = 0
        for call in self.by_process.values():
            slot = max(slot, call.slot + 1)
        walls = self.walls
        try:
            head, _, code = os.pread(job, os.fstat(job).st_size, 0).partition(b"\n")
            scratch = walls.open_scratch(slot)
            if walls.is_nested:
                kernel.unshare(kernel.NEWPID)
            try:
                pid = os.fork()
                if pid == 0:
                    self.become_cell(head, code, descriptors, slot, scratch)
            finally:
                if walls.is_nested:
                    kernel.setns(self.own_pids, kernel.NEWPID)
            ended = os.pidfd_open(pid)
        except OSError as error:  # no more processes, no disk: this call fails, the host lives
            _tell(status, f"broken cannot start a process: {error}")
            os.close(status)
        else:
            call = HostCall(pid, slot, scratch, status, head)
            self.by_status[status] = self.by_process[ended] = call
            self.poll.register(status, select.POLLIN)
            self.poll.register(ended, select.POLLIN)
        for descriptor in descriptors:
            if descriptor != status:
                os.close(descriptor)
        return True

    def become_cell(
        self, head: bytes, code: bytes, descriptors: list[int], slot: int, scratch: str | None
    ) -> NoReturn:
        """The child: confine itself, run the code, end."""
        _, stdin, stdout, stderr, status, *control = descriptors
        exit_code = 1
        try:
            self.requests.detach()
            os.dup2(stdin, 0)
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            echo, *limits = map(int, head.split())
            self.walls.enter(slot, Limits(*limits), scratch)
        except BaseException as error:  # nothing may run half confined
            _tell(status, f"broken {type(error).__name__}: {error}")
            os._exit(126)
        try:
            if control:
                os.dup2(control[0], STATE)
                os.closerange(STATE + 1, MOST_FILES)
                gc.enable()
                runner.run_session(STATE)
                exit_code = 0
            else:
                os.closerange(3, MOST_FILES)
                gc.enable()
                text = code.decode(errors="surrogatepass")
                exit_code = runner.run_program(text, echo=bool(echo))
        finally:
            os._exit(exit_code)

    def kill(self, call: HostCall) -> None:
        """End a child. As the first process of its pid namespace it takes all others with it."""
        if self.walls.method == "none":
            with contextlib.suppress(ProcessLookupError):  # it may not have made its group yet
                os.killpg(call.pid, SIGKILL)
        os.kill(call.pid, SIGKILL)

    def reap(self, ended: int) -> None:
        """Tell the caller of a child that it has ended, and how."""
        call = self.by_process.pop(ended)
        if self.walls.method == "none":  # what it left running in its group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(call.pid, SIGKILL)
        status = os.waitpid(call.pid, 0)[1]
        if call.scratch is not None:
            _remove(call.scratch)
        _tell(call.status, f"ended {os.waitstatus_to_exitcode(status)} {call.outgrew}")
        del self.by_status[call.status]
        self.poll.unregister(ended)
        if not call.is_killed:
            self.poll.unregister(call.status)
        os.close(ended)
        os.close(call.status)

    def watch(self) -> None:
        """Kill calls that have outgrown a limit which the kernel does not hold for us.

        RLIMIT_AS is for each process alone and RLIMIT_FSIZE for each file, and there are no control
        groups to count on. Only calls that last meet this: the quick ones cannot grow far.
        """
        if self.walls.is_nested:
            totals = usage.memory_of([call.pid for call in self.by_process.values()])
            for call in self.by_process.values():
                if totals.get(call.pid, 0) > call.limits.memory:
                    call.outgrew = "memory"
                    self.kill(call)
        else:
            for call in self.by_process.values():
                if call.scratch and usage.disk_of(call.scratch) > call.limits.disk:
                    call.outgrew = "disk"
                    self.kill(call)


def _remove(folder: str) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _tell(status: int, message: str) -> None:
    """To the caller: "ended", the exit code and the limit it broke; or "broken" and why."""
    with contextlib.suppress(OSError):  # the caller is gone: nobody is left to be told
        os.write(status, f"{message}\n".encode())
