"""A task in Harbor's format: a folder that holds an instruction, a machine and tests.

task.toml           limits, network, variables (`harbor_file.py`)
instruction.md      what to do
environment/        Dockerfile and its files; or docker_image in task.toml
tests/test.sh       writes /logs/verifier/reward.txt or reward.json; on the machine the folder is /tests
solution/solve.sh   how its author solves it (optional); on the machine the folder is /solution

The tests are copied to the machine when the policy is done.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from graft_envs.terminal.harbor_file import Environment, Phase, TaskFile
from graft_envs.terminal.machine import ROOT, CommandResult, Machine
from graft_envs.terminal.task import (
    NO_NETWORK,
    PUBLIC,
    HealthCheck,
    MachineSpec,
    MachineVerdict,
    Script,
    TaskFileError,
    TerminalTask,
)
from graft_envs.terminal.verifying import end_of, lacks_runner, run_script

FILE = "task.toml"
TESTS, SOLUTION, LOGS = "/tests", "/solution", "/logs/verifier"
FOLDERS = ("/logs/agent", LOGS, "/logs/artifacts")
REWARDS = ("reward.json", "reward.txt")
"""Files with the reward; the first one that there is counts."""
READ = f"cd {LOGS} && for file in {' '.join(REWARDS)}; do [ -f $file ] && cat $file && exit 0; done; exit 3"
READ_SECONDS = 30.0
SOLUTION_SECONDS = 1800.0
MAX_TASK_FILE = 1 << 20
_CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?[\d.]+")  # "01" and ".5" are no JSON
_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")


@dataclass(frozen=True, slots=True)
class RewardFileVerifier:
    """The number that the tests write."""

    script: Script

    def __call__(self, machine: Machine) -> MachineVerdict:
        files = " ".join(f"{LOGS}/{name}" for name in REWARDS)
        machine.begin_tests()
        machine.execute(f"rm -rf {files}", READ_SECONDS, user=ROOT)
        done = run_script(machine, self.script)
        return judge(done, machine.execute(READ, READ_SECONDS, user=ROOT))


def judge(done: CommandResult, file: CommandResult) -> MachineVerdict:
    """What the tests say: how they ended, and the file that they wrote."""
    if file.exit_code:
        return MachineVerdict(0.0, fault=f"no {' or '.join(REWARDS)} in {LOGS}; {end_of(done)}")
    try:
        reward, rewards = read_rewards(file.output)
    except ValueError as error:
        return MachineVerdict(0.0, fault=f"{error}; {end_of(done)}")
    if not reward and lacks_runner(done.output):
        return MachineVerdict(0.0, fault=f"reward 0 without a test runner; {end_of(done)}")
    return MachineVerdict(reward, {"rewards": rewards, "exit_code": done.exit_code})


def read_rewards(text: str) -> tuple[float, dict[str, float]]:
    """The reward, and all numbers by name: "0.5" -> 0.5; {"reward": 1, "style": 0.2} -> 1.0.

    Of several numbers the one called "reward" counts.
    """
    try:
        value: Any = float(text) if _NUMBER.fullmatch(text.strip()) else json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"the reward file has {text.strip()[:80]!r}, which is no number"
        ) from error
    named: dict[str, Any] = value if isinstance(value, dict) else {"reward": value}
    for name, number in named.items():
        if not isinstance(number, int | float) or not math.isfinite(number):
            raise ValueError(f"the reward file has {name}={number!r}, which is no finite number")
    if "reward" not in named and len(named) != 1:
        raise ValueError(
            f"the reward file has the numbers {', '.join(named) or '(none)'}, and none is called reward"
        )
    reward = named.get("reward", next(iter(named.values())))
    return float(reward), {str(name): float(number) for name, number in named.items()}


def read_task(folder: Path, variables: Collection[str] = ()) -> TerminalTask:
    """variables: names of those of this computer that the task may read."""
    folder = folder.resolve()
    file = _read_file(folder / FILE)
    environment, context = file.environment, folder / "environment"
    _refuse(folder, file)
    image = environment.docker_image or ""
    instruction, tests, solution = (
        folder / name for name in ("instruction.md", "tests", "solution")
    )
    needed = [instruction, tests / "test.sh", *([] if image else [context / "Dockerfile"])]
    for path in needed:
        if not path.is_file():
            raise TaskFileError(f"{folder} has no {path.relative_to(folder)}")

    def resolved(values: Mapping[str, str], where: str) -> dict[str, str]:
        return {
            name: _value(text, variables, f"{folder / FILE}: {where}.{name}")
            for name, text in values.items()
        }

    network, test_network = _networks(folder, file)
    agent, verifier, health = file.agent, file.verifier, environment.healthcheck
    machine = MachineSpec(
        folder=context,
        image=image,
        build_seconds=environment.build_timeout_sec,
        network=network,
        test_network=test_network,
        cpus=environment.cpus or 0.0,
        memory_mb=environment.memory_mb or 0,
        gpus=environment.gpus or 0,
        variables=resolved(environment.env, "environment.env"),
        workdir=environment.workdir or "",
        user=_user(agent),
        folders=FOLDERS,
        health=None
        if health is None
        else HealthCheck(
            health.command,
            health.interval_sec,
            health.timeout_sec,
            health.start_period_sec,
            health.start_interval_sec,
            health.retries,
        ),
    )
    script = Script(
        f"{TESTS}/test.sh",
        ((tests, TESTS),),
        verifier.timeout_sec,
        resolved(verifier.env, "verifier.env"),
        _user(verifier),
    )
    solve = Script(
        f"{SOLUTION}/solve.sh",
        ((solution, SOLUTION),),
        agent.timeout_sec or SOLUTION_SECONDS,
        {"DEBIAN_FRONTEND": "noninteractive", **resolved(file.solution.env, "solution.env")},
        _user(agent),
    )
    return TerminalTask(
        name=folder.name,
        instruction=without_canary(instruction.read_text(encoding="utf-8")).strip(),
        machine=machine,
        verifier=RewardFileVerifier(script),
        solution=solve if (solution / "solve.sh").is_file() else None,
        agent_seconds=agent.timeout_sec,
        notes=tuple(_notes(file)),
    )


def without_canary(text: str) -> str:
    """An instruction without the marks at its beginning that keep benchmarks out of training data."""
    lines = text.split("\n")
    while lines and (not lines[0].strip() or _CANARY.fullmatch(lines[0].strip())):
        del lines[0]
    return "\n".join(lines)


def _read_file(path: Path) -> TaskFile:
    try:
        if path.stat().st_size > MAX_TASK_FILE:
            raise TaskFileError(f"{path} has more than {MAX_TASK_FILE:,} bytes")
        file = TaskFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise TaskFileError(f"{path}: {where} is {first['input']!r}: {first['msg']}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TaskFileError(f"{path} cannot be read: {error}") from error
    version = file.version or file.schema_version
    if version.split(".")[0] != "1":
        raise TaskFileError(f"{path}: schema_version {version!r} is not known; 1.0 to 1.4 are")
    return file


def _refuse(folder: Path, file: TaskFile) -> None:
    """Refuse what a task needs and does not get here: it would be another task without it."""
    environment, verifier = file.environment, file.verifier
    needs = {
        "steps": (bool(file.steps), "several prompts with tests after each"),
        "environment.os": (environment.os != "linux", f"a machine with {environment.os}"),
        "environment.tpu": (environment.tpu is not None, "a TPU"),
        "environment.gpu_types": (bool(environment.gpu_types), "certain kinds of GPU"),
        "environment.mcp_servers": (bool(environment.mcp_servers), "MCP servers for the agent"),
        "verifier.environment_mode": (
            (verifier.environment_mode or "shared") != "shared" or verifier.environment is not None,
            "a machine of its own for the tests",
        ),
        "verifier.collect": (bool(verifier.collect), "snapshots of services for its tests"),
    }
    for key, (is_needed, what) in needs.items():
        if is_needed:
            raise TaskFileError(
                f"{folder / FILE}: {key} asks for {what}, which is not supported; leave this task out"
            )
    files = {
        "environment/docker-compose.yaml": "services of docker compose",
        "trajectory.json": "a conversation that went before",
        "tests/.harborignore": "a choice of its tests' files",
        "solution/.harborignore": "a choice of its solution's files",
    }
    for name, what in files.items():
        if (folder / name).exists():
            raise TaskFileError(
                f"{folder / name} asks for {what}, which is not supported; leave this task out"
            )


def _networks(folder: Path, file: TaskFile) -> tuple[str, str]:
    """The network while the policy acts and while the tests run: no-network or public."""
    mode = _mode(file.environment)
    modes = file.agent.network_mode or mode, file.verifier.network_mode or mode
    for mode in modes:
        if mode not in (NO_NETWORK, PUBLIC):
            raise TaskFileError(
                f"{folder / FILE}: network_mode {mode!r} is not supported; {NO_NETWORK} and {PUBLIC} are"
            )
    return modes


def _mode(environment: Environment) -> str:
    if environment.network_mode is None and environment.allow_internet is not None:
        return PUBLIC if environment.allow_internet else NO_NETWORK
    return environment.network_mode or PUBLIC


def _user(phase: Phase) -> str:
    return "" if phase.user is None else str(phase.user)


def _value(text: str, allowed: Collection[str], where: str) -> str:
    """The value of a variable: itself, or "${NAME:-default}" of this computer if that is allowed."""
    match = _VARIABLE.fullmatch(text)
    if match is None:
        return text
    name, default = match.groups()
    if name in allowed and name in os.environ:
        return os.environ[name]
    if default is not None:
        return default
    why = "it is not set" if name in allowed else f"variables={[name]!r} would allow it"
    raise TaskFileError(f"{where} asks for ${name} of this computer: {why}")


def _notes(file: TaskFile) -> list[str]:
    """What is read and not done."""
    notes = [f"{name} is no key of the format" for name in file.unknown()]
    if file.environment.storage_mb:
        notes.append("environment.storage_mb is not enforced")
    if file.environment.skills_dir:
        notes.append("environment.skills_dir is not shown to the policy")
    if file.artifacts:
        notes.append("artifacts are not copied from the machine")
    return notes
