"""A machine in graft's own sandbox, for where there is neither docker nor podman.

It has the programs of this computer, read-only, and a disk of its own behind /app, /tests, /root and
the like. The task's Dockerfile is followed without its FROM: what the image would bring must be
installed here.
"""

from __future__ import annotations

import base64
import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath

from graft_envs.terminal.dockerfile import Instruction, instructions, words
from graft_envs.terminal.health import wait_until_healthy
from graft_envs.terminal.machine import (
    MAX_OUTPUT,
    CommandResult,
    MachineError,
    OutputKeeper,
    shell_script,
)
from graft_envs.terminal.task import MachineSpec
from graft_sandbox import SandboxError, SandboxSession, choose
from graft_sandbox.hosts import SHELL as SHELL_VIEW
from graft_sandbox.hosts import WRITABLE

log = logging.getLogger("graft")
LEFT_OUT = (
    "terminal tasks run in the sandbox, as neither docker nor podman is used: a machine has the programs of "
    "this computer in place of its image, no network, no limit of processors, and one user"
)
METHODS = ("bubblewrap", "namespaces")
GRACE = 5.0
BUILD_SECONDS = 300.0
WORKDIR = "/app"
STATE = "/scratch/.graft-shell"  # /tmp is read-only if Python is installed there
HELPERS = f"""
import base64, json, os, select, signal, subprocess, time

MAX_OUTPUT = {MAX_OUTPUT}
{inspect.getsource(OutputKeeper)}
def run_command(arguments, folder, seconds, limit):
    process = subprocess.Popen(arguments, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True)
    kept, deadline, is_late = OutputKeeper(limit), time.monotonic() + seconds, False
    while True:
        left = deadline - time.monotonic()
        if left <= 0 and not is_late:
            is_late, deadline = True, time.monotonic() + 2
            os.killpg(process.pid, signal.SIGKILL)
            continue
        has_output = select.select([process.stdout], [], [], max(0, min(left, 0.05)))[0]
        part = os.read(process.stdout.fileno(), 1 << 16) if has_output else b""
        kept.add(part)
        # a process in the background may hold the output open
        if left <= 0 or (not part and (has_output or process.poll() is not None)):
            break
    process.stdout.close()
    print(json.dumps([kept.text, process.wait(), is_late]))

def write_files(files):
    for path, mode, content in files:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(content))
        os.chmod(path, mode)
"""


def is_available() -> bool:
    """Whether a sandbox with processes works here; Landlock alone allows one process."""
    try:
        return choose() in METHODS
    except SandboxError:
        return False


class SandboxMachine:
    """One sandbox session for one episode."""

    def __init__(self, spec: MachineSpec, *, memory_mb: int = 2048, disk_mb: int = 256) -> None:
        _note_left_out()
        memory_mb = spec.memory_mb or memory_mb
        self.session = SandboxSession(
            timeout=BUILD_SECONDS, memory_mb=memory_mb, disk_mb=disk_mb, view=SHELL_VIEW
        )
        self.folder = WORKDIR
        self.variables = {"HOME": "/scratch/root", **spec.variables}
        try:
            made = [*(f"/scratch{path}" for path in WRITABLE), *spec.folders]
            self._python(f"{HELPERS}\nfor folder in {made!r}: os.makedirs(folder, exist_ok=True)")
            if spec.dockerfile.is_file():
                for instruction in instructions(spec.dockerfile):
                    self._follow(instruction, spec.folder)
            if spec.workdir:
                self._follow(Instruction("WORKDIR", spec.workdir), spec.folder)
            if spec.health is not None:
                wait_until_healthy(self, spec.health)
        except BaseException:
            self.close()
            raise

    def run(self, command: str, seconds: float, max_output: int = MAX_OUTPUT) -> CommandResult:
        return self._run([shell_script(STATE), "shell", command], seconds, max_output, {})

    def execute(
        self,
        command: str,
        seconds: float,
        max_output: int = MAX_OUTPUT,
        *,
        variables: Mapping[str, str] | None = None,
        user: str = "",
    ) -> CommandResult:
        return self._run([command], seconds, max_output, variables or {})

    def attempt(
        self, words: Sequence[str], variables: Mapping[str, str], url: str, seconds: float
    ) -> CommandResult:
        raise MachineError(
            "task.agent runs inside the machine of a terminal task, and this one is a sandbox, which "
            "reaches no gateway; install docker or podman"
        )

    def copy(self, source: Path, target: str) -> None:
        where = _writable(target)
        found = (
            [path for path in source.rglob("*") if path.is_file()] if source.is_dir() else [source]
        )
        files: list[tuple[str, int, bytes]] = []
        for path in found:
            name = f"{where}/{path.relative_to(source).as_posix()}" if path != source else where
            files.append((name, path.stat().st_mode & 0o777, base64.b64encode(path.read_bytes())))
        self._python(f"write_files({files!r})")

    def begin_tests(self) -> None:
        """Do nothing: a sandbox never has a network."""

    def close(self) -> None:
        self.session.close()

    def _run(
        self,
        script: Sequence[str],
        seconds: float,
        max_output: int,
        variables: Mapping[str, str],
    ) -> CommandResult:
        """Run a script of bash with its arguments."""
        pairs = [f"{name}={value}" for name, value in (self.variables | dict(variables)).items()]
        arguments = ["env", *pairs, "bash", "-c", *script]
        self.session.timeout = seconds + GRACE
        self.session.max_output = 6 * max_output + 4096  # as JSON
        printed = self._python(
            f"run_command({arguments!r}, {self.folder!r}, {seconds}, {max_output})"
        )
        output, exit_code, is_timeout = json.loads(printed)
        return CommandResult(output, exit_code, is_timeout)

    def _follow(self, instruction: Instruction, context: Path) -> None:
        name, text = instruction
        if name == "WORKDIR":
            self.folder = _writable(str(PurePosixPath(self.folder) / text))
            self._python(f"os.makedirs({self.folder!r}, exist_ok=True)")
        elif name == "ENV":
            pairs = words(text)
            if "=" not in pairs[0]:
                pairs = [f"{pairs[0]}={' '.join(pairs[1:])}"]
            self.variables |= dict(pair.split("=", 1) for pair in pairs)
        elif name == "RUN":
            done = self.run(text, BUILD_SECONDS)
            if done.exit_code:
                raise MachineError(
                    f"RUN {text[:80]} failed in the sandbox, which has no network and no image; this task "
                    f"needs docker or podman: {done.output.strip()[-300:]}"
                )
        else:
            *sources, target = words(text)
            for source in sources:
                path = (context / source.lstrip("/")).resolve()
                if context not in (path, *path.parents) or not path.exists():
                    raise MachineError(f"{name} {source}: there is no such file in {context}")
                where = str(PurePosixPath(self.folder) / target)
                into = not path.is_dir() and (target.endswith(("/", ".")) or len(sources) > 1)
                self.copy(path, f"{where.rstrip('/')}/{path.name}" if into else where)

    def _python(self, code: str) -> str:
        try:
            outcome = self.session.run(code)
        except SandboxError as error:
            raise MachineError(str(error)) from error
        if not outcome.ok or outcome.is_restarted:
            reason = "it ran out of memory" if outcome.is_out_of_memory else outcome.stderr.strip()
            raise MachineError(f"the sandbox of this episode was lost: {reason[-300:]}")
        return outcome.stdout


@cache
def _note_left_out() -> None:
    log.warning(LEFT_OUT)


def _writable(path: str) -> str:
    """A path on the machine, if it is on the disk; the rest is read-only."""
    if path.startswith(("/scratch", "/tmp")) or any(
        PurePosixPath(path).is_relative_to(root) for root in WRITABLE
    ):
        return path
    raise MachineError(
        f"{path} is read-only in the sandbox, which can write below {', '.join(WRITABLE)} and /tmp; this "
        "task needs docker or podman"
    )
