"""The instructions of a Dockerfile that a machine without containers can follow."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from graft_envs.terminal.machine import MachineError

FOLLOWED = ("WORKDIR", "ENV", "COPY", "ADD", "RUN")
IGNORED = ("FROM", "CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "USER", "SHELL", "VOLUME", "MAINTAINER")


class Instruction(NamedTuple):
    name: str
    text: str


def instructions(path: Path) -> list[Instruction]:
    """What to do on the machine, in order; FROM and what only concerns containers are left out.

    "WORKDIR /app\\nRUN a && \\\\\\n  b" -> [("WORKDIR", "/app"), ("RUN", "a &&   b")]
    """
    found: list[Instruction] = []
    text = path.read_text(encoding="utf-8").replace("\\\n", "")
    for line in text.splitlines():
        name, _, rest = line.strip().partition(" ")
        name = name.upper()
        if not name or name.startswith("#") or name in IGNORED:
            continue
        if name not in FOLLOWED or "<<" in rest or rest.startswith("--"):
            raise MachineError(
                f"{path}: the instruction {line.strip()[:80]!r} needs a container; install docker or podman"
            )
        found.append(Instruction(name, rest.strip()))
    return found


def words(text: str) -> list[str]:
    """The arguments of an instruction, in either of its forms: a b, or ["a", "b"]."""
    if text.startswith("["):
        try:
            listed: Any = json.loads(text)
        except ValueError:
            listed = None
        if isinstance(listed, list):
            return [str(word) for word in listed]
    return shlex.split(text)
