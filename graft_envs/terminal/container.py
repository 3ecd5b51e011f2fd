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
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from graft.trust import check_program
from graft_envs.terminal.container_network import listen_inside, relaying
from graft_envs.terminal.health import wait_until_healthy
from graft_envs.terminal.machine import (
    MAX_AGENT_OUTPUT,
    MAX_OUTPUT,
    ROOT,
    CommandResult,
    MachineError,
    OutputKeeper,
    shell_script,
)
from graft_envs.terminal.task import PUBLIC, MachineSpec

PROGRAMS = ("docker", "podman")
GRACE = 10.0
"""Seconds beyond a command's own limit before its container is given up."""
COPY_SECONDS = 120.0
TIMED_OUT = (124, 137, 143)
"""Exit codes of `timeout`: coreutils', after a kill, busybox's."""
NETWORKS = "{{range $name, $_ := .NetworkSettings.Networks}}{{$name}} {{end}}"
LOCAL = "127.0.0.1"

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

    The image is built once per content of the task's folder, with the network. The limits of the task
    come before those that are given here.
    """

    def __init__(
        self,
        spec: MachineSpec,
        program: Sequence[str],
        *,
        name: str = "",
        network: bool | None = None,
        memory_mb: int = 2048,
        processes: int = 512,
        options: Sequence[str] = (),
    ) -> None:
        self.program, self.spec = list(program), spec
        self._networks: list[str] = []
        check_program(f"a container of {self.program[0]!r} for the terminal task {name}")
        if spec.gpus and not any("gpu" in option for option in options):
            raise MachineError(
                f"the task {name} needs {spec.gpus} GPUs; name them in run_args, such as ['--gpus=all']"
            )
        image = spec.image or self._build(spec)
        phases = (spec.network == PUBLIC, spec.test_network == PUBLIC)
        self.is_open, self.is_open_for_tests = phases if network is None else (network, network)
        limits = [f"--memory={spec.memory_mb or memory_mb}m", f"--pids-limit={processes}"]
        limits += [f"--cpus={spec.cpus:g}"] if spec.cpus else []
        isolation = ["--security-opt=no-new-privileges"]
        isolation += [] if self.is_open or self.is_open_for_tests else ["--network=none"]
        settings = [f"--env={key}={value}" for key, value in spec.variables.items()]
        settings += [f"--workdir={spec.workdir}"] if spec.workdir else []
        start = ["run", "--detach", "--rm", *limits, *isolation, *settings, *options]
        keep = ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"]
        self.id = self._command(
            *start, "--entrypoint=", image, *keep, seconds=spec.build_seconds
        ).strip()
        self._closer = weakref.finalize(self, _remove, self.program, self.id)
        try:
            self.shell = self._command(
                "exec", self.id, "sh", "-c", "command -v bash || echo sh"
            ).strip()
            self._prepare(spec)
        except BaseException:
            self.close()
            raise

    def run(self, command: str, seconds: float, max_output: int = MAX_OUTPUT) -> CommandResult:
        shell = [self.shell, "-c", shell_script(), "shell", command]
        return self._execute(shell, seconds, max_output, {}, self.spec.user)

    def execute(
        self,
        command: str,
        seconds: float,
        max_output: int = MAX_OUTPUT,
        *,
        variables: Mapping[str, str] | None = None,
        user: str = "",
    ) -> CommandResult:
        shell = [self.shell, "-c", command]
        return self._execute(shell, seconds, max_output, variables or {}, user)

    def copy(self, source: Path, target: str) -> None:
        folder = target if source.is_dir() else str(Path(target).parent)
        self._command("exec", f"--user={ROOT}", self.id, "mkdir", "-p", folder)
        path = f"{source}/." if source.is_dir() else str(source)
        self._command("cp", path, f"{self.id}:{target}")

    def attempt(
        self, words: Sequence[str], variables: Mapping[str, str], url: str, seconds: float
    ) -> CommandResult:
        parts = urlsplit(url)
        if parts.hostname != LOCAL or not parts.port:
            raise MachineError(
                f"an agent inside a container reaches the gateway at {LOCAL}, and its address is {url}; "
                "leave agent.host out"
            )
        pid = self._command("inspect", "--format={{.State.Pid}}", self.id).strip()
        with relaying(listen_inside(int(pid), parts.port), parts.port):
            return self._execute(words, seconds, MAX_AGENT_OUTPUT, variables, self.spec.user)

    def begin_tests(self) -> None:
        if self.is_open != self.is_open_for_tests:
            self._switch_network("connect" if self.is_open_for_tests else "disconnect")
            self.is_open = self.is_open_for_tests

    def close(self) -> None:
        self._closer()

    def _execute(
        self,
        words: Sequence[str],
        seconds: float,
        max_output: int,
        variables: Mapping[str, str],
        user: str,
    ) -> CommandResult:
        limit = ["timeout", "-k", "2", f"{seconds:g}"]
        # a value is taken from the environment, because others can read the command line; but one
        # that the container program itself goes by, such as PATH, must not reach it
        hidden = {
            name: value for name, value in variables.items() if os.environ.get(name, value) == value
        }
        options = [
            f"--env={name}" if name in hidden else f"--env={name}={value}"
            for name, value in variables.items()
        ]
        options += [f"--user={user}"] if user else []
        process = subprocess.Popen(
            [*self.program, "exec", *options, self.id, *limit, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **hidden},
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

    def _prepare(self, spec: MachineSpec) -> None:
        if not self.is_open and self.is_open_for_tests:
            self._switch_network("disconnect")
        if spec.folders:
            folders = " ".join(spec.folders)
            make = f"mkdir -p {folders}; chmod 777 {folders}"
            self._command("exec", f"--user={ROOT}", self.id, "sh", "-c", make)
        if spec.health is not None:
            wait_until_healthy(self, spec.health)

    def _switch_network(self, action: str) -> None:
        if not self._networks:
            found = self._command("inspect", f"--format={NETWORKS}", self.id)
            self._networks = found.split()
        for name in self._networks:
            self._command("network", action, name, self.id)

    def _is_running(self) -> bool:
        done = subprocess.run(
            [*self.program, "inspect", "--format={{.State.Running}}", self.id],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip() == "true"

    def _build(self, spec: MachineSpec) -> str:
        image = f"localhost/graft-terminal:{spec.digest}"
        with _guard:
            lock = _building.setdefault(image, threading.Lock())
        with lock:
            known = subprocess.run(
                [*self.program, "image", "inspect", image], capture_output=True, check=False
            )
            if known.returncode:
                self._command("build", "--tag", image, str(spec.folder), seconds=spec.build_seconds)
        return image

    def _command(self, *arguments: str, seconds: float = COPY_SECONDS) -> str:
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
