"""Run code in the sandbox: one program, or the cells of a session one after another."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import threading
from dataclasses import replace
from functools import lru_cache

from graft_sandbox import hosts
from graft_sandbox.choice import choose
from graft_sandbox.hosts import HostDied, SandboxError
from graft_sandbox.interpreter import inspect_interpreter
from graft_sandbox.running import DISK_MB, Running, SandboxOutcome, run_in

ATTEMPTS = 3
"""A host may be killed during a call. The code changed nothing outside, so it can run again."""

PRELOAD = {"numpy": "numpy.random", "sympy": "sympy"}
"""Packages that are slow to import: code that names one runs in a host that has imported it. Name ->
the module that the host imports; of numpy the part that has a seed."""


def run_python(
    code: str,
    stdin: str = "",
    *,
    timeout: float = 5.0,
    sandbox: str = "auto",
    memory_mb: int = 1024,
    max_output: int = 65536,
    echo: bool = False,
    interpreter: str = "",
) -> SandboxOutcome:
    """Run `code` as a program in the sandbox.

    >>> run_python("print(int(input()) + 1)", "41").stdout
    '42\\n'

    It has no network, no files but an empty scratch folder that is removed afterwards, no other
    processes, `timeout` seconds by the clock, `memory_mb` of memory and `max_output` bytes of
    output. With `echo` the value of a last line that is an expression is printed, as at a prompt.
    `interpreter` is another Python than graft's (`find_interpreter` gives its path). Safe on many threads
    at once.
    """
    method = choose(sandbox)
    preload = modules_named(code, interpreter)
    for attempt in range(1, ATTEMPTS + 1):
        host = hosts.obtain(method, preload, interpreter or hosts.PYTHON)
        try:
            return run_in(host, code, stdin, timeout, memory_mb, max_output, echo)
        except HostDied as error:
            hosts.discard(host)
            if attempt == ATTEMPTS:
                raise SandboxError(f"the sandbox died {ATTEMPTS} times: {error}") from error
    raise AssertionError("unreachable")


class SandboxSession:
    """A session like a notebook: run("x = 2"), then run("x * 21") -> stdout "42\\n".

    After a run that does not end in time, prints too much or ends the interpreter all names are lost;
    the outcome of the next run has `is_restarted`. One run at a time.
    """

    _running: Running | None = None

    def __init__(
        self,
        *,
        timeout: float = 5.0,
        sandbox: str = "auto",
        memory_mb: int = 1024,
        max_output: int = 65536,
        disk_mb: int = DISK_MB,
        view: str = hosts.PYTHON,
    ) -> None:
        """`view="shell"` shows the machine's programs too; folders such as /app are on the scratch disk. The
        path of another interpreter runs the code in that one."""
        self.timeout = timeout
        self.sandbox = sandbox
        self.memory_mb = memory_mb
        self.max_output = max_output
        self.disk_mb = disk_mb
        self.view = view
        self._is_lost = False
        self._lock = threading.Lock()

    @property
    def is_alive(self) -> bool:
        """Whether the interpreter and its names still exist."""
        return self._running is not None

    def run(self, code: str) -> SandboxOutcome:
        """Run `code` with the names of earlier runs; the value of a last expression is printed."""
        with self._lock:
            is_restarted, self._is_lost = self._is_lost, False
            for attempt in range(1, ATTEMPTS + 1):
                had_names = self.is_alive
                try:
                    self._running = self._running or self._start(code)
                    outcome = self._run(self._running, code)
                    return replace(outcome, is_restarted=is_restarted)
                except HostDied as error:
                    is_restarted |= had_names
                    if self._running is not None:
                        hosts.discard(self._running.host)
                    self._drop()
                    if attempt == ATTEMPTS:
                        raise SandboxError(f"the sandbox died {ATTEMPTS} times: {error}") from error
            raise AssertionError("unreachable")

    def close(self) -> None:
        """End the interpreter and a run in progress. A later run starts a new interpreter.

        It does not wait for the thread of that run, which may have been abandoned.
        """
        if self._lock.acquire(blocking=False):
            self._drop()
            self._is_lost = False
            self._lock.release()
        elif running := self._running:
            running.stop()

    def __enter__(self) -> SandboxSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._drop()

    def _start(self, code: str) -> Running:
        preload = modules_named(code) if self.view == hosts.PYTHON else ()
        host = hosts.obtain(choose(self.sandbox), preload, self.view)
        try:
            return Running(host, None, memory_mb=self.memory_mb, disk_mb=self.disk_mb)
        except HostDied:
            hosts.discard(host)
            raise

    def _run(self, running: Running, code: str) -> SandboxOutcome:
        message = code.encode(errors="surrogatepass")
        assert running.control is not None
        running.control.settimeout(self.timeout)  # the interpreter may not read
        with contextlib.suppress(OSError):  # it has ended or hangs: `finish` finds out
            running.control.sendall(b"%08x" % len(message) + message)
        outcome = running.finish(self.timeout, self.max_output)
        if running.ending is not None:
            self._drop()
            self._is_lost = True
        return outcome

    def _drop(self) -> None:
        """Close the interpreter's sockets, which ends it."""
        if self._running is not None:
            self._running.close()
        self._running = None


def modules_named(code: str, interpreter: str = "") -> tuple[str, ...]:
    """The modules of PRELOAD that the code names and that are installed."""
    return tuple(
        module
        for name, module in PRELOAD.items()
        if re.search(rf"\b{name}\b", code) and _is_installed(name, interpreter)
    )


@lru_cache
def _is_installed(name: str, interpreter: str) -> bool:
    if interpreter:
        folders = inspect_interpreter(interpreter).packages
        return any(hosts.packages_in(folder, [name]) for folder in folders)
    return importlib.util.find_spec(name) is not None
