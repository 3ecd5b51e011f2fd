"""A task on a machine, in whichever format it was written: what to do, on what, and how it is graded.

Formats are modules with FILE, the name of the file that describes a task, and `read_task(folder)`:
`terminal_bench.py` (task.yaml) and `harbor.py` (task.toml).
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from graft_envs.terminal.machine import Machine

NO_NETWORK, PUBLIC = "no-network", "public"
BUILD_SECONDS = 1800.0


class TaskFileError(ValueError):
    """A task folder that cannot be used, and why."""


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """A command that must succeed before the task begins."""

    command: str
    interval: float = 5.0
    seconds: float = 30.0
    start_period: float = 0.0
    """Seconds in which a failure does not count."""
    start_interval: float = 5.0
    retries: int = 3


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """The computer of a task."""

    folder: Path
    """What its image is built from: Dockerfile and the files beside it."""
    apart: tuple[Path, ...] = ()
    """What lies in that folder and is no part of the machine."""
    image: str = ""
    """A ready image, in place of the Dockerfile."""
    build_seconds: float = BUILD_SECONDS
    network: str = NO_NETWORK
    test_network: str = NO_NETWORK
    """While the tests run."""
    cpus: float = 0.0
    """0: no limit."""
    memory_mb: int = 0
    """0: the environment's."""
    gpus: int = 0
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    workdir: str = ""
    """Empty: the image's."""
    user: str = ""
    """Who the policy is; empty: the image's user."""
    folders: tuple[str, ...] = ()
    """Made before the task begins; every user may write there."""
    health: HealthCheck | None = None

    @property
    def dockerfile(self) -> Path:
        return self.folder / "Dockerfile"

    @property
    def digest(self) -> str:
        """The digest of everything that the image is built from."""
        sha = hashlib.sha256()
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and not {path, *path.parents} & {*self.apart}:
                sha.update(f"{path.relative_to(self.folder)}\0{path.stat().st_size}\0".encode())
                sha.update(path.read_bytes())
        return sha.hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class MachineVerdict:
    """What the tests of a task say about a machine."""

    reward: float
    info: Mapping[str, object] = field(default_factory=dict[str, object])
    fault: str = ""
    """Why the tests came to no result, with the end of their output; the reward is that of a policy
    whose work kept them from running."""


class Verifier(Protocol):
    """Grades a machine."""

    def __call__(self, machine: Machine) -> MachineVerdict: ...


@dataclass(frozen=True, slots=True)
class Script:
    """A file of the task that is run on its machine, and what it needs there."""

    path: str
    copies: tuple[tuple[Path, str], ...]
    """File or folder -> path on the machine."""
    seconds: float
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    user: str = ""
    """Who runs it; empty: the image's user."""
    shell: str = ""
    """What runs it; empty: the program in its first line."""
    in_policys_shell: bool = False
    """Whether it runs in the policy's folder and with its variables."""


@dataclass(frozen=True, slots=True)
class TerminalTask:
    name: str
    instruction: str
    machine: MachineSpec
    verifier: Verifier
    probe: str = ""
    """A command that fails if the tests may not be able to run: they are then tried before any attempt."""
    solution: Script | None = None
    """How its author solves it."""
    agent_seconds: float | None = None
    """That an agent's command may take; None: no limit of the task."""
    notes: tuple[str, ...] = ()
    """What its description asks for that is not done."""

    def solution_text(self) -> str:
        """The author's commands, if they are one file."""
        if self.solution is None:
            raise TaskFileError(f"task {self.name!r} has no solution")
        [(source, _)] = self.solution.copies
        files = (
            [path for path in source.rglob("*") if path.is_file()] if source.is_dir() else [source]
        )
        if len(files) > 1:
            raise TaskFileError(
                f"the solution of task {self.name!r} has {len(files)} files, which a policy could not have "
                "typed as one command"
            )
        variables = self.solution.variables.items()
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables)
        return exports + files[0].read_text(encoding="utf-8")


def positive(value: object, what: str) -> float:
    """A number of a task file that must be above 0."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
        return float(value)
    raise TaskFileError(f"{what} is {value!r}; give a number above 0")
