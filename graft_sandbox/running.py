"""A running program in a host: its output so far, its end, and how to stop it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import time
from dataclasses import dataclass
from typing import BinaryIO

from graft_sandbox.hosts import HostDied, SandboxError, SandboxHost

MEGABYTE = 1 << 20
DISK_MB = 64
PROCESSES = 64
FILES, FEWEST_FILES = 128, 32
SOCKET_BUFFER = 212_992
"""Bytes of kernel memory that one open file can take: those of a full socket."""
MAX_REPLY = 16  # bytes; an exit code and a newline
ADD_SEALS, ALL_SEALS = 1033, 0b1111  # of fcntl; missing in Python on other systems
STOP_SECONDS = 30.0
"""How long the kernel may take to end a killed program before its host is discarded."""


@dataclass(frozen=True, slots=True)
class SandboxOutcome:
    """The output of a program and how it ended.

    `print(1/0)` -> stdout "", stderr "Traceback ... ZeroDivisionError: division by zero",
    exit_code 1, ok False.
    """

    stdout: str
    stderr: str
    exit_code: int
    """Negative: the signal that ended it."""
    seconds: float
    is_timeout: bool = False
    is_out_of_memory: bool = False
    is_output_cut: bool = False
    """It printed more than the limit and was stopped."""
    is_restarted: bool = False
    """In a SandboxSession: an earlier run ended the interpreter, so this one started without names."""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not (self.is_timeout or self.is_output_cut)


class Running:
    """One child of a host; `close` kills a child that still runs.

    `code=None` starts a session, which runs the code that is sent to `control`.
    """

    def __init__(
        self,
        host: SandboxHost,
        code: str | None,
        stdin: bytes = b"",
        *,
        echo: bool = False,
        timeout: float | None = None,
        memory_mb: int = 1024,
        disk_mb: int = DISK_MB,
    ) -> None:
        # a limit on processor time, in case the clock below fails
        cpu = 0 if timeout is None else int(timeout) + 2
        memory = memory_mb * MEGABYTE
        # the buffers of one process shall be at most a tenth of its memory
        files = max(FEWEST_FILES, min(FILES, memory // 10 // SOCKET_BUFFER))
        limits = (cpu, memory, disk_mb * MEGABYTE, PROCESSES, files)
        head = " ".join(map(str, (int(echo), *limits))).encode()
        # a policy's code may hold lone surrogates
        program = (code or "").encode(errors="surrogatepass")
        self.host = host
        self.stdout, self.stderr = bytearray(), bytearray()
        self.replies = bytearray()
        """Bytes that the session wrote to `control`."""
        self.ending: tuple[int, str] | None = None
        """The exit code of a child that has ended, and the limit that it exceeded."""
        self._status_text = bytearray()
        try:
            self._begin(head, program, stdin, is_session=code is None)
        except OSError as error:
            raise SandboxError(f"cannot start a program in the sandbox: {error}") from error
        self._poll = select.poll()
        for descriptor in self._streams:
            os.set_blocking(descriptor, False)
            self._poll.register(descriptor, select.POLLIN)

    def _begin(self, head: bytes, program: bytes, stdin: bytes, *, is_session: bool) -> None:
        host = self.host
        # closes everything if the host is gone or no descriptors are left
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            if not is_session:
                host.running.add(self)
                ours.callback(host.running.discard, self)
            self._status, status = _sockets(ours, theirs)
            out, their_out = _pipe(ours, theirs)
            err, their_err = _pipe(ours, theirs)
            self._streams = {
                out: self.stdout,
                err: self.stderr,
                self._status.fileno(): self._status_text,
            }
            passed = [their_out, their_err, status.fileno()]
            self.control = None
            if is_session:
                self.control, control = _sockets(ours, theirs)
                self._streams[self.control.fileno()] = self.replies
                passed.append(control.fileno())
            with _file(program) as program_file, _file(stdin) as stdin_file:
                host.send(head, [program_file.fileno(), stdin_file.fileno(), *passed])
            self._files = ours.pop_all()

    def read(self, wait: float) -> None:
        """Read the available output, waiting at most `wait` seconds for it."""
        for descriptor, _ in self._poll.poll(max(0.0, wait) * 1000):
            part = _read(descriptor)
            if part:
                self._streams[descriptor] += part
            elif part == b"":
                self._poll.unregister(descriptor)
                if descriptor == self._status.fileno():
                    self._end()

    def wait(self, timeout: float, max_output: int) -> str:
        """Wait until the child has ended or, in a session, replied. A child that is late or prints too
        much is killed, and the result is "timeout" or "output"; else it is ""."""
        deadline = time.monotonic() + timeout
        why = ""
        while self.ending is None and (why or b"\n" not in self.replies):
            self.read(deadline - time.monotonic())
            is_late = time.monotonic() >= deadline
            is_full = len(self.stdout) + len(self.stderr) > max_output
            is_full |= len(self.replies) > MAX_REPLY  # the code wrote to the control socket
            if self.ending is not None or not (is_late or is_full or why):
                continue
            if why and is_late:
                raise HostDied(f"a killed program did not end within {STOP_SECONDS:g} s")
            if not why:
                why = "output" if is_full else "timeout"
                deadline = time.monotonic() + STOP_SECONDS
                self.stop()
            self.replies.clear()
            for stream in (self.stdout, self.stderr):  # it may print until it dies
                del stream[max_output + 1 :]
        self._read_rest(max_output)
        return why or ("output" if len(self.stdout) + len(self.stderr) > max_output else "")

    def finish(self, timeout: float, max_output: int) -> SandboxOutcome:
        """`wait`, then the output since the last call and the exit code or the reply."""
        began = time.monotonic()
        why = self.wait(timeout, max_output)
        if self.ending is not None:
            exit_code, exceeded = self.ending
        else:
            reply = self.replies.partition(b"\n")[0]  # untrusted: the program may write anything
            exit_code, exceeded = int(reply) if reply.isdigit() and len(reply) < 4 else 1, ""
            self.replies.clear()
        stdout, stderr = _text(self.stdout, max_output), _text(self.stderr, max_output)
        self.stdout.clear()
        self.stderr.clear()
        return SandboxOutcome(
            stdout=stdout,
            stderr=stderr,
            exit_code=exit_code,
            seconds=time.monotonic() - began,
            # one that ended without being killed has ended in time: only the report was late
            is_timeout=why == "timeout" and exit_code < 0,
            is_out_of_memory=exceeded == "memory" or ran_out_of_memory(stderr),
            is_output_cut=why == "output",
        )

    def stop(self) -> None:
        """Kill the child, from any thread; `wait` then returns."""
        with contextlib.suppress(OSError):  # closed already, or stopped before
            self._status.shutdown(socket.SHUT_WR)  # the host then kills the child

    def close(self) -> None:
        self._files.close()

    def _end(self) -> None:
        """Read the host's report, or that of a child that could not confine itself."""
        if not self._status_text:
            raise HostDied(f"the {self.host.method} sandbox ended during the program")
        word, _, rest = self._status_text.decode(errors="replace").partition("\n")[0].partition(" ")
        if word == "broken":
            raise SandboxError(f"the {self.host.method} sandbox could not be set up: {rest}")
        exit_code, _, exceeded = rest.partition(" ")
        self.ending = int(exit_code), exceeded

    def _read_rest(self, max_output: int) -> None:
        """Read the last output, up to the limit: a thread of a session may continue to print."""
        for descriptor, stream in list(self._streams.items())[:2]:
            while len(stream) <= max_output and (part := _read(descriptor)):
                stream += part


def run_in(
    host: SandboxHost,
    code: str,
    stdin: str = "",
    timeout: float = 5.0,
    memory_mb: int = 1024,
    max_output: int = 65536,
    echo: bool = False,
) -> SandboxOutcome:
    """Run a program in this host and wait for it; `run_python` describes the arguments."""
    given = stdin.encode(errors="surrogatepass")
    running = Running(host, code, given, echo=echo, timeout=timeout, memory_mb=memory_mb)
    with contextlib.closing(running):
        return running.finish(timeout, max_output)


def ran_out_of_memory(stderr: str) -> bool:
    """True if the last line of a traceback is a MemoryError, numpy's own included."""
    last = stderr.rstrip().rpartition("\n")[2].partition(":")[0]
    return last.rpartition(".")[2].endswith("MemoryError")


def _text(output: bytearray, limit: int) -> str:
    return output[:limit].decode(errors="replace")


def _read(descriptor: int) -> bytes | None:
    """The available bytes; b"" at the end, None if there are none yet."""
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        return b""


def _sockets(
    ours: contextlib.ExitStack, theirs: contextlib.ExitStack
) -> tuple[socket.socket, socket.socket]:
    """A socket pair; each stack closes its end."""
    near, far = socket.socketpair()
    return ours.enter_context(near), theirs.enter_context(far)


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    """(read end, write end); the child gets the second."""
    near, far = os.pipe()
    ours.callback(os.close, near)
    theirs.callback(os.close, far)
    return near, far


def _file(content: bytes) -> BinaryIO:
    """A file without a name that holds `content`, positioned at its start. Nobody can change it: the
    program could otherwise store more in it than its limits allow."""
    if not content:
        return open(os.devnull, "rb")  # noqa: PTH123
    descriptor = os.memfd_create("graft", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    file = open(descriptor, "w+b", buffering=0)  # noqa: PTH123, SIM115
    file.write(content)
    file.seek(0)
    fcntl.fcntl(descriptor, ADD_SEALS, ALL_SEALS)
    return file  # pyright: ignore[reportReturnType]
