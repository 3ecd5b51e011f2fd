"""A task in terminal-bench's format: a folder that holds an instruction, a machine and tests.

task.yaml          instruction, max_test_timeout_sec, max_agent_timeout_sec, parser_name,
                   run_tests_in_same_shell
Dockerfile         the machine
run-tests.sh       runs the tests, which are in tests/; on the machine the folder is /tests
solution.sh        how its author solves it (optional)
test_weights.json  {"test_name": weight} (optional; without it all tests count the same)
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from graft.trust.bounds import read_yaml
from graft_envs.terminal.machine import Machine
from graft_envs.terminal.summary import defined_tests, has_summary, outcomes, score
from graft_envs.terminal.task import (
    MachineSpec,
    MachineVerdict,
    Script,
    TaskFileError,
    TerminalTask,
    positive,
)
from graft_envs.terminal.verifying import end_of, run_script

FILE = "task.yaml"
TESTS, SOLUTION = "/tests", "/solution/solution.sh"
TEST_SECONDS = 180.0
PARSERS = ("pytest",)
HAS_PYTEST = "command -v pytest || python3 -c 'import pytest' || python -c 'import pytest'"
SHELL = "$(command -v bash || echo sh)"


@dataclass(frozen=True, slots=True)
class PytestVerifier:
    """The weight of the tests that passed, by pytest's summary."""

    script: Script
    tests: Path
    weights: Mapping[str, float] = field(default_factory=dict[str, float])

    def __call__(self, machine: Machine) -> MachineVerdict:
        done = run_script(machine, self.script)
        results = outcomes(done.output)
        names = self.weights or dict.fromkeys(defined_tests(self.tests) or results, 1.0)
        results = {name: results.get(name, False) for name in names}
        passed = sum(results.values())
        info = {"tests_passed": passed, "tests_failed": len(results) - passed, "tests": results}
        fault = "" if has_summary(done.output) else f"no summary of pytest; {end_of(done)}"
        return MachineVerdict(score(results, names), info, fault)


def read_task(folder: Path, variables: Collection[str] = ()) -> TerminalTask:
    """The task in a folder. variables: of this computer, which this format does not read."""
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
    folder = folder.resolve()
    tests, runner, solution = (folder / name for name in ("tests", "run-tests.sh", "solution.sh"))
    agent = loaded.get("max_agent_timeout_sec")
    agent_seconds = None if agent is None else _seconds(loaded, "max_agent_timeout_sec", folder)
    test_seconds = _seconds(loaded, "max_test_timeout_sec", folder)
    copies = ((tests, TESTS),) if tests.is_dir() else ()
    target = f"{TESTS}/{runner.name}"
    script = Script(
        target,
        (*copies, (runner, target)),
        test_seconds,
        {"TEST_DIR": TESTS},
        shell=SHELL,
        in_policys_shell=bool(loaded.get("run_tests_in_same_shell", False)),
    )
    solve = Script(SOLUTION, ((solution, SOLUTION),), agent_seconds or test_seconds, shell=SHELL)
    return TerminalTask(
        name=folder.name,
        instruction=instruction,
        machine=MachineSpec(folder, apart=(tests, runner, solution)),
        verifier=PytestVerifier(script, tests, _weights(folder / "test_weights.json")),
        probe=HAS_PYTEST,
        solution=solve if solution.exists() else None,
        agent_seconds=agent_seconds,
    )


def _instruction(loaded: Mapping[str, Any]) -> str:
    """The key `instruction`, or the first of `descriptions` in the format's first version."""
    if loaded.get("instruction"):
        return str(loaded["instruction"]).strip()
    descriptions: Any = loaded.get("descriptions") or [{}]
    first = descriptions[0]
    return str(first.get("description", "")).strip() if isinstance(first, dict) else ""


def _seconds(loaded: Mapping[str, Any], key: str, folder: Path) -> float:
    return positive(loaded.get(key, TEST_SECONDS), f"{folder / FILE}: {key}")


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
