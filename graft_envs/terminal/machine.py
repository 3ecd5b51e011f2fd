"""The machine on which the commands of one episode run, and what a command returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

MAX_OUTPUT = 8_000  # below what ToolEnv cuts
"""Bytes of a command's output that the policy reads."""


def shell_script(state: str = "/tmp/.graft-shell") -> str:
    """A script for any shell that runs its first argument in the folder and with the exported variables
    of the run before it; it keeps them in the file `state`."""
    return f"""
if [ -f {state} ]; then . {state}; cd "$(cat {state}.folder)"; fi 2>/dev/null
trap 'code=$?; {{ pwd > {state}.folder; export -p > {state}; }} 2>/dev/null; exit $code' EXIT
eval "$1"
"""


@dataclass(frozen=True, slots=True)
class CommandResult:
    output: str
    """Of stdout and stderr together; the middle of a long one is left out."""
    exit_code: int
    is_timeout: bool = False


class MachineError(RuntimeError):
    """A machine that cannot be started or was lost; not the policy's doing."""


class Machine(Protocol):
    """One computer for one episode."""

    def run(self, command: str, seconds: float, max_output: int = MAX_OUTPUT) -> CommandResult:
        """Run a command of the policy in its shell, which keeps folder and variables."""
        ...

    def execute(
        self,
        command: str,
        seconds: float,
        max_output: int = MAX_OUTPUT,
        *,
        variables: Mapping[str, str] | None = None,
        user: str = "",
    ) -> CommandResult:
        """Run a command in a new shell in the working folder. user: empty, the one of the image."""
        ...

    def copy(self, source: Path, target: str) -> None:
        """Copy a file to the path `target`, or the content of a folder into the folder `target`."""
        ...

    def attempt(
        self, words: Sequence[str], variables: Mapping[str, str], url: str, seconds: float
    ) -> CommandResult:
        """Run an agent's program, which reaches the server at `url` and knows these variables."""
        ...

    def begin_tests(self) -> None:
        """Change to the network that the tests have."""
        ...

    def close(self) -> None: ...


ROOT = "0"
"""The user who prepares and reads a machine; images need not have a name for it."""
MAX_AGENT_OUTPUT = 3_000
"""Bytes of an agent's output that are kept."""


class OutputKeeper:
    """The first and last bytes of an output of any length, in bounded memory."""

    def __init__(self, limit: int = MAX_OUTPUT) -> None:
        self.limit = limit
        self.head, self.tail = bytearray(), bytearray()
        self.size = 0

    def add(self, part: bytes) -> None:
        self.size += len(part)
        room = max(0, self.limit // 2 - len(self.head))
        self.head += part[:room]
        self.tail += part[room:]
        if len(self.tail) > self.limit:  # now and then, so that adding stays cheap
            del self.tail[: -self.limit // 2]

    @property
    def text(self) -> str:
        tail = self.tail[-(self.limit // 2) :]
        left_out = self.size - len(self.head) - len(tail)
        gap = f"\n[... {left_out:,} bytes left out ...]\n" if left_out else ""
        head, end = (bytes(part).decode(errors="replace") for part in (self.head, tail))
        return f"{head}{gap}{end}"
