"""`graft ARGUMENTS` in a process of its own, without the seconds that importing torch takes.

    done = graft("train", "tiny.yaml", cwd=folder)          # waits; like subprocess.run
    running = start("train", "tiny.yaml")                   # does not; like subprocess.Popen
    running.kill()
    python("import graft; print(graft.__version__)")        # code instead of a command

A server process imports graft and its libraries once (`tests.preloaded`); every command is a fork of
it. Files, signals, exit codes, limits and the environment are those of a process of its own. What it
cannot show is the start itself: imports and `python -m graft` are tested by real processes.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.full_disk import limit_files

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preloaded"])
PATIENCE = 200.0
_LOCK = threading.Lock()
"""A start looks at the ends of all processes: two threads that read one end would find 255."""


@dataclass(frozen=True, slots=True)
class Completed:
    """How a command ended; a negative `returncode` is the signal that ended it."""

    returncode: int
    stdout: str
    stderr: str


class Command:
    """A command under way."""

    def __init__(
        self,
        arguments: tuple[str, ...],
        environment: Mapping[str, str],
        cwd: str | Path | None = None,
        largest_file: int | None = None,
        code: str | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="graft-command-")
        self._output = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        for path in self._output:
            path.touch()
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **environment}
        where = str(cwd or Path.cwd())
        outputs = [str(path) for path in self._output]
        self._process = _CONTEXT.Process(
            target=_run, args=(arguments, environment, where, outputs, largest_file, code)
        )
        with _LOCK:
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def stdout(self) -> str:
        """What it has written so far."""
        return self._output[0].read_text("utf-8")

    @property
    def stderr(self) -> str:
        return self._output[1].read_text("utf-8")

    def poll(self) -> int | None:
        with _LOCK:
            return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float = PATIENCE) -> Completed:
        wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            self._process.kill()
            wait([self._process.sentinel])
            raise TimeoutError(f"the command still ran after {timeout:g} s:\n{self.stderr}")
        done = Completed(code, self.stdout, self.stderr)
        self._folder.cleanup()
        return done


def start(
    *arguments: str,
    cwd: str | Path | None = None,
    largest_file: int | None = None,
    **environment: str,
) -> Command:
    """Begin `graft ARGUMENTS`; files may grow to `largest_file` bytes, as on a disk that is full."""
    return Command(arguments, environment, cwd, largest_file)


def graft(*arguments: str, timeout: float = PATIENCE, **options: Any) -> Completed:
    """Run `graft ARGUMENTS` to its end; `options` as in `start`."""
    return start(*arguments, **options).wait(timeout)


def python(code: str, *arguments: str, timeout: float = PATIENCE, **environment: str) -> Completed:
    """Run `python -c CODE ARGUMENTS` to its end."""
    return Command(arguments, environment, code=code).wait(timeout)


def _run(
    arguments: tuple[str, ...],
    environment: Mapping[str, str],
    cwd: str,
    outputs: list[str],
    largest_file: int | None,
    code: str | None,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, (path, stream) in enumerate(zip(outputs, ("stdout", "stderr"), strict=True), 1):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
        setattr(sys, stream, os.fdopen(number, "w", encoding="utf-8", closefd=False))
    # as `python -m graft` would find modules: the working directory, then PYTHONPATH
    sys.path[:0] = [cwd, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = ["graft", *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if largest_file is not None:
        limit_files(largest_file)
    from graft.cli import main

    try:
        if code is None:
            main()
        else:
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves without them
        sys.stdout.flush()
        sys.stderr.flush()
