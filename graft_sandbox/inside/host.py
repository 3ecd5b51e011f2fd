"""The warm process: one fork per request.

A request is a line of numbers on the socket with descriptors: a file with the code, stdin, stdout and
stderr of the child, a status socket, and for a session its control socket. The numbers are: 1 to echo
the last value, then `Limits`. Only the child reads the code: what the host has had in memory, every
later child could find in its own. On the status socket the host writes the exit
code when the child has ended; when the caller closes it, the child is killed. The host ends when its
caller does.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import resource
import select
import sys
import time
from _socket import socket  # the module `socket` is large
from typing import Any, NoReturn

from . import (
    HEAD,
    READY,
    READY_WITH_GROUPS,
    cgroup,
    cleanup,
    kernel,
    landlock,
    rootfs,
    runner,
    usage,
)
from .confinement import Confinement, Limits
from .forks import ForkGate
from .seccomp import LISTENERS, SCRATCH
from .writes import WriteGate

CONTROL = 3  # the descriptor of a session's control socket
SIGKILL = 9  # importing `signal` would slow down every fork
MAX_FILES = 1 << 16
WATCH = 0.01
"""Seconds between two checks of running calls; quick calls end before the first."""
WATCH_GROWING = 0.003
"""The same while a call writes files, and while several processes share the memory of a call: one that
ends gives its part back."""
REST = 3
"""After a check the host does not check again for this multiple of its duration."""
IDLE = 0.05
"""Seconds between two checks while no call uses the processor."""


class HostCall:
    """A running child."""

    __slots__ = (
        "began", "exceeded", "full", "gate", "group", "head", "is_killed", "pid", "scratch", "serial",
        "slot", "status", "writes",
    )  # fmt: skip

    def __init__(
        self,
        serial: int,
        pid: int,
        slot: int,
        scratch: str | None,
        status: int,
        head: bytes,
        group: cgroup.CallGroup | None,
    ) -> None:
        self.serial = serial
        self.pid = pid
        self.slot = slot
        self.scratch = scratch
        self.status = status
        self.head = head
        """Its limits as text, parsed only for long calls."""
        self.group = group
        self.began = time.monotonic()
        self.gate: ForkGate | None = None
        """Decides on its new processes."""
        self.writes: WriteGate | None = None
        """Decides on files that it writes, if it has no disk of its own."""
        self.full = 0.0
        """When it last had as many processes as it may."""
        self.is_killed = False
        """Its caller has closed the status socket."""
        self.exceeded = ""
        """The limit for which the host killed it: "memory" or "disk"."""

    @property
    def limits(self) -> Limits:
        return read_limits(self.head)


def main() -> None:
    config: dict[str, Any] = json.loads(sys.argv[2])
    sys.path[:] = [path for path in sys.path if path != sys.argv[1]] + config["site"]
    method = config["method"]
    own_pids = -1
    if method == "namespaces":
        is_root = rootfs.is_privileged()
        rootfs.enter_namespaces(is_root)
        if child := os.fork():
            os.close(config["requests"])
            status = os.waitpid(child, 0)[1]
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    if method in ("namespaces", "bubblewrap"):
        # the parent has one thread, so this cannot fire early
        kernel.prctl(kernel.PR_SET_PDEATHSIG, SIGKILL)
        own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    if method == "namespaces":
        rootfs.build_root(config["readable"], config["links"], config["hidden"])
    elif method == "landlock":
        landlock.version()
    runner.prepare(config["preload"])
    listeners = open_listeners()
    confinement = Confinement(method, config["readable"], config["users"], config["scratch"])
    if method == "bubblewrap" and not confinement.try_nesting(own_pids):
        confinement.is_nested = False  # bwrap may be the only program that is allowed namespaces
        confinement.has_landlock = True
        if not landlock.is_available():  # a call could open /proc/1/mem, the memory of the host
            sys.exit("programs in bwrap may not create namespaces here, and there is no Landlock")
    if method == "landlock":
        confinement.hide(config["hidden"])
    if config["group"] is not None:
        confinement.has_groups = cgroup.enter(config["group"])
    host = ForkServer(confinement, config["requests"], config["caller"], own_pids, listeners)
    try:
        host.serve()
    finally:
        for call in host.by_process.values():
            host.kill(call)
        if host.cleaner is not None:
            host.cleaner.close()
            cleanup.remove(confinement.scratch)


class ForkServer:
    """Serves requests. It does little work here and in `run_child` on purpose: after a fork every page
    that either process writes is copied, and that is most of the cost of a call."""

    def __init__(
        self,
        confinement: Confinement,
        requests: int,
        caller: int,
        own_pids: int,
        listeners: socket,
    ) -> None:
        self.listeners = listeners
        self.by_listener: dict[int, HostCall] = {}
        self.num_calls = 0
        self.confinement = confinement
        self.requests = socket(fileno=requests)
        self.caller = caller
        self.own_pids = own_pids
        self.by_status: dict[int, HostCall] = {}
        # by the descriptor that becomes readable at its end
        self.by_process: dict[int, HostCall] = {}
        self.cleaner = None if confinement.is_nested else cleanup.Cleaner(confinement.scratch)
        self.is_ending = False
        """Clean-up has failed: the caller starts another host, with another folder."""
        self.due = 0.0
        """When to check the running calls."""
        self.ticks = 0
        """Processor time of all calls at the last check."""

    def serve(self) -> None:
        """Answer requests until the caller is gone."""
        self.confinement.restrict_host()
        gc.collect()
        gc.freeze()  # a collection in a child would copy every page
        gc.disable()
        self.poll = poll = select.poll()
        requests, caller = self.requests.fileno(), self.caller
        poll.register(requests, select.POLLIN)
        poll.register(caller, select.POLLIN)
        listeners = self.listeners.fileno()
        poll.register(listeners, select.POLLIN)
        writes = self.confinement.writes
        if writes is not None:
            poll.register(writes, select.POLLIN)
        cleaner = -1 if self.cleaner is None else self.cleaner.ended
        if self.cleaner is not None:
            poll.register(cleaner, select.POLLIN)
        self.meter = usage.MemoryMeter(self.confinement.loaded)
        self.groups = cgroup.CallGroups(self.meter.inherited)
        self.requests.send(READY_WITH_GROUPS if self.confinement.has_groups else READY)
        while True:
            wait = max(0.0, self.due - time.monotonic()) * 1000 if self.by_process else None
            events = poll.poll(wait)
            for descriptor, event in events:
                if descriptor == requests:
                    if not self.take():
                        return
                elif descriptor in self.by_process:
                    self.reap(descriptor)
                elif descriptor in self.by_status:  # the caller has closed it
                    self.by_status[descriptor].is_killed = True
                    self.kill(self.by_status[descriptor])
                    poll.unregister(descriptor)
                elif descriptor == listeners:
                    self.take_listener()
                elif writes is not None and descriptor == writes:
                    self.take_write(writes)
                elif descriptor in self.by_listener:
                    if event & select.POLLIN:
                        self.decide(self.by_listener[descriptor])
                    else:  # its last process has ended; to receive would block
                        del self.by_listener[descriptor]
                        poll.unregister(descriptor)
                elif descriptor == cleaner:
                    self.is_ending = True
                    poll.unregister(cleaner)
                elif descriptor == caller:
                    return
            if writes is not None:
                self.decide_writes(writes)
            if self.by_process and (now := time.monotonic()) >= self.due:  # also of a busy host
                rest = self.watch(now)
                done = time.monotonic()
                self.due = done + max(rest, REST * (done - now))
            if self.is_ending and not self.by_process:
                return

    def take(self) -> bool:
        """Start the requested child; False if the caller has closed the socket."""
        head, ancillary, _, _ = self.requests.recvmsg(HEAD, 64)
        if not ancillary:
            return False
        descriptors = memoryview(ancillary[0][2]).cast("i").tolist()
        status = descriptors[4]
        self.num_calls += 1
        serial, slot = self.num_calls, 0
        for call in self.by_process.values():
            slot = max(slot, call.slot + 1)
        confinement = self.confinement
        group = None
        try:
            scratch = confinement.open_scratch(slot)
            if confinement.has_groups:
                group = self.open_group(head)
            if confinement.is_nested:
                kernel.unshare(kernel.NEWPID)
            try:
                pid = os.fork() if group is None else group.fork()
                if pid == 0:
                    self.run_child(head, descriptors, slot, scratch, serial)
            finally:
                if confinement.is_nested:
                    kernel.setns(self.own_pids, kernel.NEWPID)
            ended = os.pidfd_open(pid)
        except OSError as error:  # no more processes, no disk: only this call fails
            _report(status, f"broken cannot start a process: {error}")
            os.close(status)
            if group is not None:
                self.groups.close(group)
        else:
            call = HostCall(serial, pid, slot, scratch, status, head, group)
            self.by_status[status] = self.by_process[ended] = call
            self.poll.register(status, select.POLLIN)
            self.poll.register(ended, select.POLLIN)
        for descriptor in descriptors:
            if descriptor != status:
                os.close(descriptor)
        return True

    def open_group(self, head: bytes) -> cgroup.CallGroup:
        """A control group for a new call. Without one it is not started: the caller starts another
        host, with another folder of groups."""
        try:
            return self.groups.open(read_limits(head))
        except OSError:
            self.is_ending = True
            raise

    def run_child(
        self, head: bytes, descriptors: list[int], slot: int, scratch: str | None, serial: int
    ) -> NoReturn:
        """The child: confine itself, run the code, end."""
        program, stdin, stdout, stderr, status, *control = descriptors
        exit_code = 1
        try:
            self.requests.detach()
            os.dup2(stdin, 0)
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            echo, *limits = map(int, head.split())
            self.confinement.enter(slot, Limits(*limits), scratch, serial)
        except BaseException as error:  # no code may run half confined
            _report(status, f"broken {type(error).__name__}: {error}")
            os._exit(126)
        try:
            if control:
                os.dup2(control[0], CONTROL)
                os.closerange(CONTROL + 1, MAX_FILES)
                gc.enable()
                runner.run_session(CONTROL)
                exit_code = 0
            else:
                text = read_whole(program).decode(errors="surrogatepass")
                os.closerange(3, MAX_FILES)
                gc.enable()
                exit_code = runner.run_program(text, echo=bool(echo))
        finally:
            os._exit(exit_code)

    def take_listener(self) -> None:
        """The listener of a call that has confined itself."""
        number, ancillary, _, _ = self.listeners.recvmsg(8, 64)
        serial = int.from_bytes(number, sys.byteorder)
        for _, _, data in ancillary:
            listener = int.from_bytes(data[:4], sys.byteorder)
            for call in self.by_process.values():
                if call.serial == serial:
                    confinement = self.confinement
                    user = confinement.user(call.slot) if confinement.is_root else None
                    limits = call.limits
                    buffers = limits.files * self.meter.socket_buffer
                    call.gate = ForkGate(listener, limits.memory, confinement.loaded, buffers, user)
                    self.by_listener[listener] = call
                    self.poll.register(listener, select.POLLIN)
                    break
            else:  # it has ended already
                os.close(listener)

    def decide(self, call: HostCall) -> None:
        """Answer a call that wants to start a process."""
        assert call.gate is not None
        with contextlib.suppress(OSError):  # it may be killed meanwhile
            request, thread, shares_memory = call.gate.receive()
            refusal = errno.EAGAIN
            if time.monotonic() - call.full > WATCH:  # else a fork bomb would keep the host busy
                with contextlib.suppress(OSError):
                    tree = usage.by_root(usage.process_table(), [call.pid])[call.pid]
                    if sum(process.num_threads for process in tree) < call.limits.processes:
                        parent = usage.leader(thread)
                        if call.group is not None:
                            call.group.fit(len(tree) + len(call.gate.approvals) + 1)
                        refusal = call.gate.admit(tree, parent, shares_memory=shares_memory)
                    else:
                        call.full = time.monotonic()
            call.gate.answer(request, refusal)
            self.due = 0.0  # the limits are divided anew as soon as the process is seen

    def take_write(self, listener: int) -> None:
        """A call wants to write a file."""
        with contextlib.suppress(OSError):  # it may be killed meanwhile
            request, thread, *_ = kernel.receive(listener)
            by_pid = {call.pid: call for call in self.by_process.values()}
            call = by_pid.get(thread) or by_pid.get(usage.leader(thread))
            if call is None:  # its start has failed
                return kernel.answer(listener, request, errno.EPERM)
            if call.writes is None:
                confinement = self.confinement
                user = confinement.user(call.slot) if confinement.is_root else None
                call.writes = WriteGate(call.pid, str(call.scratch), call.limits.disk, user)
            call.writes.ask(thread, request)

    def decide_writes(self, listener: int) -> None:
        """Answer the calls that want to write files, where it can be said now."""
        for call in self.by_process.values():
            if call.writes is None or not call.writes.waiting:
                continue
            self.confinement.look_as(call.slot)
            try:
                decided = call.writes.decide()
            except OSError:  # it has ended meanwhile
                call.writes.waiting.clear()
                continue
            finally:
                self.confinement.look_as(None)
            for request, is_admitted in decided:
                with contextlib.suppress(OSError):
                    kernel.answer(listener, request, 0 if is_admitted else errno.ENOSPC)
            if call.writes.waiting:
                self.due = min(self.due, time.monotonic() + WATCH_GROWING)

    def kill(self, call: HostCall) -> None:
        """Kill a child, the first process of its pid namespace: all others in it end too."""
        if call.group is not None:
            call.group.kill()
        if self.confinement.method == "none":
            with contextlib.suppress(ProcessLookupError):  # it may not have its own group yet
                os.killpg(call.pid, SIGKILL)
        os.kill(call.pid, SIGKILL)

    def reap(self, ended: int) -> None:
        """Report the end of a child and its exit code to the caller."""
        call = self.by_process.pop(ended)
        if self.confinement.method == "none":  # the processes that it left in its group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(call.pid, SIGKILL)
        status = os.waitpid(call.pid, 0)[1]
        if call.group is not None and os.WIFSIGNALED(status) and not call.exceeded:
            call.exceeded = "memory" if call.group.is_out_of_memory() else ""
        if self.cleaner is not None and call.scratch is not None:
            try:
                self.cleaner.remove(call.scratch.rpartition("/")[2])
            except OSError:
                self.is_ending = True
        _report(call.status, f"ended {os.waitstatus_to_exitcode(status)} {call.exceeded}")
        if call.group is not None:
            has_ended_by_itself = os.WIFEXITED(status) and self.confinement.method != "none"
            self.groups.close(call.group, is_empty=has_ended_by_itself)
        del self.by_status[call.status]
        self.poll.unregister(ended)
        if call.gate is not None:
            if self.by_listener.pop(call.gate.listener, None):
                self.poll.unregister(call.gate.listener)
            os.close(call.gate.listener)
        if not call.is_killed:
            self.poll.unregister(call.status)
        os.close(ended)
        os.close(call.status)

    def watch(self, now: float) -> float:
        """Kill calls that exceed a limit which the kernel does not enforce. The seconds until the next
        check: many if none of them has used the processor."""
        calls = [
            call
            for call in self.by_process.values()
            if now - call.began > WATCH or (call.gate and call.gate.is_divided)
        ]
        if self.confinement.is_nested:
            trees = usage.by_root(usage.process_table(), [call.pid for call in calls])
        else:  # a call is one process
            trees = {call.pid: usage.alone(call.pid) for call in calls}
        is_growing = False
        for call in calls:
            if call.exceeded or not (processes := trees[call.pid]):
                continue
            limits = call.limits
            self.confinement.look_as(call.slot)
            if self.meter.is_above(processes, limits.memory):
                call.exceeded = "memory"
            elif sum(process.num_threads for process in processes) > limits.processes:
                call.exceeded = "processes"
            elif call.scratch and (used := usage.disk(call.pid, call.scratch, limits.disk)):
                is_growing |= used > limits.disk // 16
                if used > limits.disk // (usage.KILLED_AT if call.writes is None else 1):
                    call.exceeded = "disk"
            elif call.gate is not None:
                # where the host may not set limits, no process was approved
                with contextlib.suppress(OSError):
                    call.gate.rebalance(processes)
                    if call.group is not None and not call.gate.approvals:
                        call.group.fit(len(processes))
            self.confinement.look_as(None)
            if call.exceeded:
                self.kill(call)
        ticks = sum(process.ticks for tree in trees.values() for process in tree)
        is_idle, self.ticks = ticks == self.ticks, ticks
        can_burst = self.confinement.has_landlock and self.confinement.writes is None
        if is_idle and not can_burst:  # files that are only counted may grow within milliseconds
            return IDLE
        is_growing |= any(call.gate is not None and call.gate.is_divided for call in calls)
        return WATCH_GROWING if is_growing else WATCH


def read_limits(head: bytes) -> Limits:
    return Limits(*map(int, head.split()[1:]))


def open_listeners() -> socket:
    """The host's end of the socket on which children send their listeners; theirs is LISTENERS."""
    from _socket import AF_UNIX, SOCK_STREAM, socketpair

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard <= SCRATCH:
        sys.exit(f"only {hard} open files are allowed here (ulimit -Hn); {SCRATCH + 1} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a session takes four here
    ours, theirs = socketpair(AF_UNIX, SOCK_STREAM)
    os.dup2(theirs.fileno(), LISTENERS)
    theirs.close()
    return ours


def read_whole(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _report(status: int, message: str) -> None:
    """Write to the caller: "ended", the exit code and the exceeded limit; or "broken" and the reason."""
    with contextlib.suppress(OSError):  # the caller is gone
        os.write(status, f"{message}\n".encode())
