"""A pool of worker processes for calls that may hang or run out of memory.

    this process ── control ──> template ──fork──> worker, worker, ...
         └────────── one socket to each worker ────────┘

The template is a fresh interpreter (this process may hold threads and a GPU) that has imported the slow
libraries once, so a killed worker is replaced in milliseconds. A worker sets an alarm before each call, so
that the kernel ends it past its limit. The limit is processor time: a reward must not depend on what else
the machine does. When this process dies the sockets close, and all workers end.
Requests and replies are JSON: nothing that a worker sends is executed in this process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any

from graft.registry import load

START_LIMIT = 120.0  # seconds to import the libraries on a busy machine
WAIT = 20  # times its limit that a call may take by the clock, where other processes hold the processors
GRACE = 0.5  # seconds past that until this side gives up on a worker
MAX_MEMORY = 4 << 30  # bytes of address space of a worker
_LENGTH = struct.Struct(">I")


class WorkerError(RuntimeError):
    """A call failed in its worker; the message says how."""


class WorkerTimeout(WorkerError):
    """A call took longer than its limit, and its worker was ended."""


class NoWorkers(WorkerError):
    """The processes cannot be started here."""


class WorkerPool:
    """A pool of at most `size` workers, started when they are first needed; safe for threads.

    >>> pool = WorkerPool("graft.rewards.maths.symbolic:warm")
    >>> pool.call("graft.rewards.maths.symbolic:math_equal", "1/2", "0.5", timeout=1.0)
    True

    `warm` is called once, in the template: it imports the libraries that the calls need.
    """

    def __init__(self, warm: str, size: int | None = None) -> None:
        self.warm = warm
        is_linux = sys.platform == "linux"
        self.size = size or min(
            8, len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1
        )
        self._begin()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(self.size)
        self._idle: list[_Worker] = []
        self._template: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def call(self, function: str, *args: Any, timeout: float) -> Any:
        """The result of `function` ("module:name") for these arguments; both must be JSON.

        The limit is processor time of the call alone; a wait for a free worker, for the first start or
        for a processor is extra.
        """
        request = json.dumps([function, args, timeout]).encode()
        with self._slots:
            for is_last in (False, True):
                worker = self._take()
                started = time.monotonic()
                try:
                    reply = worker.call(request, WAIT * timeout + GRACE)
                except (OSError, EOFError) as error:
                    worker.kill()
                    if time.monotonic() - started >= 0.9 * timeout:
                        raise WorkerTimeout(f"{function} took more than {timeout} s") from None
                    if is_last:  # all workers are being killed, or this call kills them
                        raise WorkerError(f"{function}: its worker died ({error!r})") from None
                    continue
                with self._lock:
                    self._idle.append(worker)
                value, failure = json.loads(reply)
                if failure is not None:
                    raise WorkerError(f"{function}: {failure}")
                return value

    def close(self) -> None:
        """End all processes; the next call starts new ones."""
        with self._lock:
            workers, self._idle = self._idle, []
            self._drop_template()
        for worker in workers:
            worker.channel.close()

    def _forget(self) -> None:
        """Close the parent's sockets in a forked process, or its workers would outlive it."""
        for worker in self._idle:
            worker.channel.close()
        if self._control is not None:
            self._control.close()
        if self._template is not None:
            self._template.returncode = 0  # not a child of this process: nothing to wait for
        self._begin()

    def _take(self) -> _Worker:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            for is_last in (False, True):  # the first try finds out that the template was killed
                try:
                    return self._fork()
                except (OSError, EOFError) as error:
                    self._drop_template()
                    if is_last:
                        raise NoWorkers(f"cannot start worker processes: {error!r}") from error
        raise AssertionError("unreachable")

    def _fork(self) -> _Worker:
        if self._control is None:
            self._start_template()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
            pid = json.loads(receive(ours, time.monotonic() + START_LIMIT))
        except BaseException:
            ours.close()
            raise
        return _Worker(ours, pid)

    def _start_template(self) -> None:
        self._control, theirs = socket.socketpair()  # `_drop_template` closes it if this fails
        code = f"from {__name__} import serve; serve({theirs.fileno()}, {self.warm!r})"
        with theirs:
            self._template = subprocess.Popen(
                [sys.executable, "-P", "-c", code],  # -P: the same modules as this process
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path),
                    "PYTHONHASHSEED": "0",  # the order of sets must not change results
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                },
                start_new_session=True,  # Ctrl-C reaches this process alone, which then closes the sockets
            )
        failure = json.loads(receive(self._control, time.monotonic() + START_LIMIT))
        if failure is not None:
            self._drop_template()
            raise NoWorkers(f"cannot start worker processes: {failure}")

    def _drop_template(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._template is not None:
            self._template.kill()
            self._template.wait()
            self._template = None


class _Worker:
    def __init__(self, channel: socket.socket, pid: int) -> None:
        self.channel = channel
        self.pid = pid

    def call(self, request: bytes, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        self.channel.settimeout(timeout)
        send(self.channel, request)
        return receive(self.channel, deadline)

    def kill(self) -> None:
        self.channel.close()
        with contextlib.suppress(ProcessLookupError):  # its alarm ended it
            os.kill(self.pid, signal.SIGKILL)


def send(channel: socket.socket, message: bytes) -> None:
    channel.sendall(_LENGTH.pack(len(message)) + message)


def receive(channel: socket.socket, deadline: float | None = None) -> bytes:
    """One message; EOFError if the other side is gone, TimeoutError past the deadline."""
    (length,) = _LENGTH.unpack(_read(channel, _LENGTH.size, deadline))
    return _read(channel, length, deadline)


def _read(channel: socket.socket, count: int, deadline: float | None) -> bytes:
    parts: list[bytes] = []
    while count:
        if deadline is not None:
            channel.settimeout(max(deadline - time.monotonic(), 0.001))
        part = channel.recv(min(count, 1 << 20))
        if not part:
            raise EOFError("the other process is gone")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


# the functions below run in the template and in the workers


def serve(control_fd: int, warm: str) -> None:
    """The template process: import, then fork a worker for each socket that arrives."""
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies: no process waits for the workers
    import resource  # missing on some systems

    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    failure = None
    try:
        load(warm, "warm-up")()
    except Exception as error:  # the parent reports it
        failure = f"{type(error).__name__}: {error}"
    send(control, json.dumps(failure).encode())
    while failure is None:
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            break
        if os.fork() == 0:
            control.close()
            work(socket.socket(fileno=fds[0]))
            break
        os.close(fds[0])
    os._exit(0)  # skips the clean-up of libraries, which is slow and needless here


def work(channel: socket.socket) -> None:
    """The worker process: answer calls until the socket closes."""
    for ends_at_once in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(ends_at_once, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    send(channel, json.dumps(os.getpid()).encode())
    while True:
        try:
            function, args, timeout = json.loads(receive(channel))
        except (EOFError, OSError):
            return
        _set_alarms(timeout)
        try:
            reply = [load(function, "function")(*args), None]
            message = json.dumps(reply).encode()
        except Exception as error:  # the caller decides what to do about it
            message = json.dumps([None, f"{type(error).__name__}: {str(error)[:500]}"]).encode()
        _set_alarms(0)
        try:
            send(channel, message)
        except OSError:
            return


def _set_alarms(timeout: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, timeout)
    signal.setitimer(signal.ITIMER_REAL, WAIT * timeout)
