"""A task in terminal-bench's format: a folder that holds an instruction, a machine and tests.

task.yaml          instruction, max_test_timeout_sec, parser_name
Dockerfile         the machine
run-tests.sh       runs the tests, which are in tests/; on the machine the folder is /tests
solution.sh        how its author solves it (optional)
test_weights.json  {"test_name": weight} (optional; without it all tests count the same)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from graft.trust.bounds import read_yaml

FILE = "task.yaml"
TEST_SECONDS = 180.0
PARSERS = ("pytest",)


class TaskFileError(ValueError):
    """A task folder that cannot be used, and why."""


@dataclass(frozen=True, slots=True)
class TerminalTask:
    name: str
    folder: Path
    instruction: str
    test_seconds: float = TEST_SECONDS
    weights: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def dockerfile(self) -> Path:
        return self.folder / "Dockerfile"

    @property
    def tests(self) -> Path:
        return self.folder / "tests"

    @property
    def runner(self) -> Path:
        return self.folder / "run-tests.sh"

    @property
    def digest(self) -> str:
        """The digest of everything that the machine is built from: tests and solution are not part of it."""
        sha = hashlib.sha256()
        apart = (self.tests, self.runner, self.folder / "solution.sh")
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and not any(path == one or one in path.parents for one in apart):
                sha.update(f"{path.relative_to(self.folder)}\0{path.stat().st_size}\0".encode())
                sha.update(path.read_bytes())
        return sha.hexdigest()[:24]

    def solution(self) -> str:
        """The author's commands."""
        path = self.folder / "solution.sh"
        if not path.exists():
            raise TaskFileError(f"{self.folder} has no solution.sh")
        return path.read_text(encoding="utf-8")


def read_tasks(where: str | Path) -> list[TerminalTask]:
    """The task in this folder, or the tasks in the folders below it, by name."""
    root = Path(where).expanduser()
    if not root.is_dir():
        raise TaskFileError(f"data={str(where)!r}: there is no such folder")
    files = [root / FILE] if (root / FILE).exists() else sorted(root.glob(f"*/{FILE}"))
    if not files:
        raise TaskFileError(
            f"data={str(where)!r}: neither it nor a folder in it has a {FILE}, the file that "
            "describes a task of terminal-bench"
        )
    return [read_task(file.parent) for file in files]


def read_task(folder: Path) -> TerminalTask:
    try:
        loaded: Any = yaml.safe_load(read_yaml(folder / FILE))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise TaskFileError(f"{folder / FILE} cannot be read: {error}") from error
    if not isinstance(loaded, dict):
        raise TaskFileError(f"{folder / FILE} is not a mapping of keys to values")
    instruction = _instruction(loaded)
    if not instruction:
        raise TaskFileError(f"{folder / FILE} has no instruction")
    parser = loaded.get("parser_name", PARSERS[0])
    if parser not in PARSERS:
        raise TaskFileError(
            f"{folder / FILE}: parser_name {parser!r} is not supported; results are read from "
            f"{', '.join(PARSERS)}"
        )
    for missing in ("Dockerfile", "run-tests.sh"):
        if not (folder / missing).is_file():
            raise TaskFileError(f"{folder} has no {missing}")
    _refuse_services(folder / "docker-compose.yaml")
    return TerminalTask(
        name=folder.resolve().name,
        folder=folder.resolve(),
        instruction=instruction,
        test_seconds=_seconds(loaded.get("max_test_timeout_sec", TEST_SECONDS), folder),
        weights=_weights(folder / "test_weights.json"),
    )


def _instruction(loaded: Mapping[str, Any]) -> str:
    """The key `instruction`, or the first of `descriptions` in the format's first version."""
    if loaded.get("instruction"):
        return str(loaded["instruction"]).strip()
    descriptions: Any = loaded.get("descriptions") or [{}]
    first = descriptions[0]
    return str(first.get("description", "")).strip() if isinstance(first, dict) else ""


def _seconds(value: Any, folder: Path) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise TaskFileError(
            f"{folder / FILE}: max_test_timeout_sec is {value!r}; give seconds above 0"
        )
    return float(value)


def _refuse_services(path: Path) -> None:
    """Tasks run on one machine; a compose file may describe more."""
    if not path.exists():
        return
    try:
        loaded: Any = yaml.safe_load(read_yaml(path))
        services = list(loaded["services"])
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError) as error:
        raise TaskFileError(f"{path} has no readable `services`: {error}") from error
    if len(services) > 1:
        raise TaskFileError(
            f"{path} has the services {', '.join(map(str, services))}; only tasks with one machine "
            "are supported: leave this one out"
        )


def _weights(path: Path) -> dict[str, float]:
    if not path.exists():
        return {}
    try:
        loaded: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TaskFileError(f"{path} cannot be read: {error}") from error
    if not isinstance(loaded, dict) or not all(
        isinstance(weight, int | float) and weight >= 0 for weight in loaded.values()
    ):
        raise TaskFileError(f"{path} must map names of tests to weights of 0 or more")
    if not sum(loaded.values()):
        raise TaskFileError(f"{path} has no weight above 0, so that nothing could be earned")
    return {str(name): float(weight) for name, weight in loaded.items()}
