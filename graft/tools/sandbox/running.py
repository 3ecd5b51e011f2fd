"""A program under way in a host: its output so far, how it ended, the means to stop it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import tempfile
import time
from typing import BinaryIO

from graft.tools.sandbox.hosts import HostDied, SandboxHost
from graft.tools.sandbox.outcome import SandboxError, SandboxOutcome

MEGABYTE = 1 << 20
DISK_MB = 64
PROCESSES = 64
FILES = 128
MAX_REPLY = 16  # bytes; an exit code and a newline
STOP_SECONDS = 30.0
"""How long the kernel may take to end a killed program before we give its host up."""


class Running:
    """One child of a host. Use as a context; leaving it early kills the child.

    `code=None` starts a session, which runs what is sent to `control`.
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
    ) -> None:
        # the processor's clock is a second wall behind ours
        cpu = 0 if timeout is None else int(timeout) + 2
        limits = (cpu, memory_mb * MEGABYTE, DISK_MB * MEGABYTE, PROCESSES, FILES)
        head = " ".join(map(str, (int(echo), *limits)))
        # a policy's code may hold anything that a str can, half characters included
        job = f"{head}\n{code or ''}".encode(errors="surrogatepass")
        self.host = host
        self.stdout, self.stderr = bytearray(), bytearray()
        self.replies = bytearray()
        """What the session wrote to `control`."""
        self.ending: tuple[int, str] | None = None
        """The exit code of a child that has ended, and the limit that it was killed for."""
        self._said = bytearray()
        # a host that is gone, or no descriptors left: nothing stays open
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            if code is not None:
                host.running.add(self)
                ours.callback(host.running.discard, self)
            self._status, status = _sockets(ours, theirs)
            out, their_out = _pipe(ours, theirs)
            err, their_err = _pipe(ours, theirs)
            self._streams = {out: self.stdout, err: self.stderr, self._status.fileno(): self._said}
            passed = [their_out, their_err, status.fileno()]
            self.control = None
            if code is None:
                self.control, control = _sockets(ours, theirs)
                self._streams[self.control.fileno()] = self.replies
                passed.append(control.fileno())
            with _file(job) as job_file, _file(stdin) as stdin_file:
                host.send([job_file.fileno(), stdin_file.fileno(), *passed])
            self._files = ours.pop_all()
        self._poll = select.poll()
        for descriptor in self._streams:
            os.set_blocking(descriptor, False)
            self._poll.register(descriptor, select.POLLIN)

    def read(self, wait: float) -> None:
        """Take in what there is, waiting at most `wait` seconds for something to come."""
        for descriptor, _ in self._poll.poll(max(0.0, wait) * 1000):
            part = _read(descriptor)
            if part:
                self._streams[descriptor] += part
            elif part == b"":
                self._poll.unregister(descriptor)
                if descriptor == self._status.fileno():
                    self._end()

    def wait(self, timeout: float, max_output: int) -> str:
        """Until the child has ended or, in a session, replied. A child that is late or prints too
        much is killed, and the answer is "timeout" or "output"; else it is ""."""
        deadline = time.monotonic() + timeout
        why = ""
        while self.ending is None and (why or b"\n" not in self.replies):
            self.read(deadline - time.monotonic())
            is_late = time.monotonic() >= deadline
            is_full = len(self.stdout) + len(self.stderr) > max_output
            is_full |= len(self.replies) > MAX_REPLY  # the session meddles with its line to us
            if self.ending is not None or not (is_late or is_full or why):
                continue
            if why and is_late:
                raise HostDied(f"a killed program did not end within {STOP_SECONDS:g} s")
            if not why:
                why = "output" if is_full else "timeout"
                deadline = time.monotonic() + STOP_SECONDS
                self.stop()
            self.replies.clear()
            for stream in (self.stdout, self.stderr):  # it goes on printing until it dies
                del stream[max_output + 1 :]
        self._read_rest(max_output)
        return why or ("output" if len(self.stdout) + len(self.stderr) > max_output else "")

    def outcome(self, max_output: int, seconds: float, why: str) -> SandboxOutcome:
        """What it printed since the last time, and how it ended or what it replied."""
        if self.ending is not None:
            exit_code, outgrew = self.ending
        else:
            reply = self.replies.partition(b"\n")[0]  # of a program: it may say anything
            exit_code, outgrew = int(reply) if reply.isdigit() and len(reply) < 4 else 1, ""
            self.replies.clear()
        stdout, stderr = _text(self.stdout, max_output), _text(self.stderr, max_output)
        self.stdout.clear()
        self.stderr.clear()
        return SandboxOutcome(
            stdout=stdout,
            stderr=stderr,
            exit_code=exit_code,
            seconds=seconds,
            is_timeout=why == "timeout",
            is_out_of_memory=outgrew == "memory" or ran_out_of_memory(stderr),
            is_output_cut=why == "output",
        )

    def finish(self, timeout: float, max_output: int) -> SandboxOutcome:
        """`wait`, and what came of it."""
        began = time.monotonic()
        why = self.wait(timeout, max_output)
        return self.outcome(max_output, time.monotonic() - began, why)

    def stop(self) -> None:
        """Have the child killed; whoever waits for it sees it end. From any thread."""
        with contextlib.suppress(OSError):  # closed already, or stopped before
            self._status.shutdown(socket.SHUT_WR)  # the host hears it

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self) -> None:
        """Read the host's last words, or the first ones of a child that could not confine itself."""
        if not self._said:
            raise HostDied(f"the {self.host.method} sandbox ended under the program")
        word, _, rest = self._said.decode(errors="replace").partition("\n")[0].partition(" ")
        if word == "broken":
            raise SandboxError(f"the {self.host.method} sandbox could not be closed: {rest}")
        exit_code, _, outgrew = rest.partition(" ")
        self.ending = int(exit_code), outgrew

    def _read_rest(self, max_output: int) -> None:
        """What it printed last; no more than is needed, for a thread of a session prints on."""
        for descriptor, stream in list(self._streams.items())[:2]:
            while len(stream) <= max_output and (part := _read(descriptor)):
                stream += part


def ran_out_of_memory(stderr: str) -> bool:
    """True if the last line of a traceback is a MemoryError, numpy's own included."""
    last = stderr.rstrip().rpartition("\n")[2].partition(":")[0]
    return last.rpartition(".")[2].endswith("MemoryError")


def _text(output: bytearray, limit: int) -> str:
    return output[:limit].decode(errors="replace")


def _read(descriptor: int) -> bytes | None:
    """What there is; b"" at the end, None if there is nothing yet."""
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        return b""


def _sockets(
    ours: contextlib.ExitStack, theirs: contextlib.ExitStack
) -> tuple[socket.socket, socket.socket]:
    """Two ends, each closed by its stack."""
    near, far = socket.socketpair()
    return ours.enter_context(near), theirs.enter_context(far)


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    """What the child writes into the second is read from the first."""
    near, far = os.pipe()
    ours.callback(os.close, near)
    theirs.callback(os.close, far)
    return near, far


def _file(content: bytes) -> BinaryIO:
    """A nameless file that holds `content`, to be read from its start."""
    if not content:
        return open(os.devnull, "rb")  # noqa: PTH123
    if hasattr(os, "memfd_create"):
        file = open(os.memfd_create("graft"), "w+b", buffering=0)  # noqa: PTH123, SIM115
    else:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    file.write(content)
    file.seek(0)
    return file  # pyright: ignore[reportReturnType]
