"""An interpreter that stays alive: the names of one run are available in the next."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import replace

from graft.tools.sandbox import hosts
from graft.tools.sandbox.choice import choose
from graft.tools.sandbox.hosts import HostDied
from graft.tools.sandbox.outcome import SandboxError, SandboxOutcome
from graft.tools.sandbox.run import ATTEMPTS, modules_named
from graft.tools.sandbox.running import Running


class SandboxSession:
    """Like a notebook: run("x = 2"), then run("x * 21") -> stdout "42\\n".

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
    ) -> None:
        self.timeout = timeout
        self.sandbox = sandbox
        self.memory_mb = memory_mb
        self.max_output = max_output
        self._is_lost = False
        self._lock = threading.Lock()

    @property
    def is_alive(self) -> bool:
        """Whether the interpreter and its names still exist."""
        return self._running is not None

    def run(self, code: str, *, echo: bool = True) -> SandboxOutcome:
        """Run `code` with the names of earlier runs."""
        with self._lock:
            is_restarted, self._is_lost = self._is_lost, False
            for attempt in range(ATTEMPTS):
                had_names = self._running is not None
                try:
                    self._running = self._running or self._start(code)
                    outcome = self._run(self._running, code, echo)
                    return replace(outcome, is_restarted=is_restarted)
                except HostDied as error:
                    is_restarted |= had_names
                    if self._running is not None:
                        hosts.discard(self._running.host)
                    self._drop()
                    if attempt == ATTEMPTS - 1:
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
        host = hosts.obtain(choose(self.sandbox), modules_named(code))
        try:
            return Running(host, None, memory_mb=self.memory_mb)
        except HostDied:
            hosts.discard(host)
            raise

    def _run(self, running: Running, code: str, echo: bool) -> SandboxOutcome:
        began = time.monotonic()
        message = json.dumps({"code": code, "echo": echo}).encode()
        control = running.control
        assert control is not None
        control.settimeout(self.timeout)  # the interpreter may not read
        with contextlib.suppress(OSError):  # it has ended or hangs: `wait` below finds out
            control.sendall(b"%08x" % len(message) + message)
        why = running.wait(self.timeout, self.max_output)
        outcome = running.outcome(self.max_output, time.monotonic() - began, why)
        if running.ending is not None:
            self._drop()
            self._is_lost = True
        return outcome

    def _drop(self) -> None:
        """Close the interpreter's sockets, which ends it."""
        if self._running is not None:
            self._running.close()
        self._running = None
