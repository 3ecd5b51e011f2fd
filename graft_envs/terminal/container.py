"""A machine that is a container of docker or podman, built from the task's Dockerfile."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from graft.trust import check_program
from graft_envs.terminal.machine import (
    MAX_OUTPUT,
    CommandResult,
    MachineError,
    OutputKeeper,
    shell_script,
)
from graft_envs.terminal.task import TerminalTask

PROGRAMS = ("docker", "podman")
GRACE = 10.0
"""Seconds beyond a command's own limit before its container is given up."""
BUILD_SECONDS = 1800.0
TIMED_OUT = (124, 137, 143)
"""Exit codes of `timeout`: coreutils', after a kill, busybox's."""

_building: dict[str, threading.Lock] = {}
_guard = threading.Lock()


def container_program() -> str:
    """The first of docker and podman that is installed and answers; "" if none does."""
    for name in PROGRAMS:
        path = shutil.which(name)
        if (
            path
            and subprocess.run([path, "info"], capture_output=True, check=False).returncode == 0
        ):
            return path
    return ""


class Container:
    """One container. `program` is its command with global options, such as ["podman", "--runtime=runc"].

    The image is built once per content of the task's folder, with the network; the container has
    none unless `network`.
    """

    def __init__(
        self,
        task: TerminalTask,
        program: Sequence[str],
        *,
        network: bool = False,
        memory_mb: int = 2048,
        processes: int = 512,
        options: Sequence[str] = (),
    ) -> None:
        self.program = list(program)
        check_program(f"a container of {self.program[0]!r} for the terminal task {task.name}")
        image = self._build(task)
        limits = [f"--memory={memory_mb}m", f"--pids-limit={processes}"]
        isolation = ["--security-opt=no-new-privileges"]
        isolation += [] if network else ["--network=none"]
        start = ["run", "--detach", "--rm", *limits, *isolation, *options]
        keep = ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"]
        self.id = self._command(*start, "--entrypoint=", image, *keep).strip()
        self._closer = weakref.finalize(self, _remove, self.program, self.id)
        self.shell = self._command(
            "exec", self.id, "sh", "-c", "command -v bash || echo sh"
        ).strip()

    def run(self, command: str, seconds: float, max_output: int = MAX_OUTPUT) -> CommandResult:
        limit = ["timeout", "-k", "2", f"{seconds:g}"]
        shell = [self.shell, "-c", shell_script(), "shell", command]
        arguments = [*self.program, "exec", self.id, *limit, *shell]
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        kept, began = OutputKeeper(max_output), time.monotonic()
        is_over = _read(process, kept, began + seconds + GRACE)
        if not is_over:
            os.killpg(process.pid, signal.SIGKILL)
        exit_code = process.wait()
        if not is_over:
            self.close()
            raise MachineError(
                f"a command did not end {GRACE:g} s after its limit of {seconds:g} s"
            )
        if exit_code in (125, 126, 127) and not self._is_running():
            raise MachineError(f"the container has ended: {kept.text.strip()[-300:]}")
        # a command may also end with such a code in time
        is_timeout = exit_code in TIMED_OUT and time.monotonic() - began >= seconds
        return CommandResult(kept.text, exit_code, is_timeout)

    def copy(self, source: Path, target: str) -> None:
        self._command("exec", self.id, "mkdir", "-p", str(Path(target).parent))
        self._command("cp", str(source), f"{self.id}:{target}")

    def close(self) -> None:
        self._closer()

    def _is_running(self) -> bool:
        done = subprocess.run(
            [*self.program, "inspect", "--format={{.State.Running}}", self.id],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip() == "true"

    def _build(self, task: TerminalTask) -> str:
        image = f"localhost/graft-terminal:{task.digest}"
        with _guard:
            lock = _building.setdefault(image, threading.Lock())
        with lock:
            known = subprocess.run(
                [*self.program, "image", "inspect", image], capture_output=True, check=False
            )
            if known.returncode:
                self._command("build", "--tag", image, str(task.folder), seconds=BUILD_SECONDS)
        return image

    def _command(self, *arguments: str, seconds: float = 120.0) -> str:
        try:
            done = subprocess.run(
                [*self.program, *arguments],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MachineError(f"{self.program[0]} {arguments[0]}: {error}") from error
        if done.returncode:
            reason = (done.stderr or done.stdout).strip()[-600:]
            raise MachineError(f"{self.program[0]} {arguments[0]} failed: {reason}")
        return done.stdout


def _read(process: subprocess.Popen[bytes], kept: OutputKeeper, deadline: float) -> bool:
    """Read until the process closes its output; False if that takes beyond the deadline."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector, process.stdout as stream:
        selector.register(stream, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            part = os.read(stream.fileno(), 1 << 16)
            if not part:
                return True
            kept.add(part)
    return False


def _remove(program: list[str], container: str) -> None:
    subprocess.run([*program, "rm", "--force", container], capture_output=True, check=False)
