"""Work in a shell until the task is done; then the task's own tests grade the machine."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from graft.envs.base import BaseEnv, Trace
from graft.envs.splits import check_split, split_of
from graft.tools.errors import ERROR, ToolError
from graft.tools.function import tool
from graft.types import Author, Turn
from graft_envs.terminal.container import Container, container_program
from graft_envs.terminal.grading import defined_tests, has_summary, outcomes, score
from graft_envs.terminal.machine import Machine, MachineError
from graft_envs.terminal.sandboxed import SandboxMachine
from graft_envs.terminal.task import TerminalTask, read_tasks

TESTS = "/tests"
COMMAND_SECONDS = 30.0
MAX_COMMAND_SECONDS = 600.0
TEST_OUTPUT = 1 << 20
SANDBOX = "sandbox"
GRADES = ("share", "all")
HAS_PYTEST = "command -v pytest || python3 -c 'import pytest' || python -c 'import pytest'"
_gradable: set[tuple[str, str]] = set()
"""Tasks and programs whose tests are known to run, in this process."""


class TerminalEnv(BaseEnv):
    """A shell on a machine of its own; calls of the tool `bash`, then a turn without a call.

        env     Write the number of lines of data.txt to count.txt.
        policy  <bash>wc -l < data.txt > count.txt; cat count.txt</bash>
        env     <result>12</result>
        policy  Done.                    the tests run: the reward is the weight that passed

    `data` is a task folder of terminal-bench, or a folder of them; with `holdout` one in ten, chosen
    by name, is in split "test" and the others in "train". `program` is the container command with its
    global options ("docker", "podman --runtime=runc"), or "sandbox" for graft's own (`sandboxed.py`);
    empty: the first of docker, podman and sandbox that works. `run_args` are options of `docker run`.
    `grade="all"` earns 1 only if every test passes, as in terminal-bench. After `max_failures` commands
    with an exit code other than 0 no more are run. Machines have no network unless `network`, which
    many published tasks need to install pytest.
    """

    blocking = True
    max_turns = 1
    shared = ("tasks",)
    saved = (*BaseEnv.saved, "task_name", "commands", "failures")
    tool_options = {"max_uses": 50}

    def __init__(
        self,
        data: str | Path,
        *,
        split: str = "train",
        holdout: bool = False,
        program: str = "",
        run_args: Sequence[str] = (),
        network: bool = False,
        memory_mb: int = 2048,
        command_seconds: float = COMMAND_SECONDS,
        max_failures: int | None = None,
        grade: str = "share",
    ) -> None:
        super().__init__()
        if grade not in GRADES:
            raise ValueError(f"grade={grade!r}: must be one of {', '.join(GRADES)}")
        self.split = check_split(split)
        self.tasks = {one.name: one for one in _part(read_tasks(data), split, holdout, data)}
        self.program, self.run_args = program.split(), tuple(run_args)
        self.network, self.memory_mb = network, memory_mb
        self.command_seconds, self.max_failures, self.grade = command_seconds, max_failures, grade
        self.machine: Machine | None = None
        self.task_name = ""
        self.commands: list[tuple[str, float]] = []
        """Those that were run, with their limits in seconds: a fork repeats them on a machine of its own."""
        self.failures = 0

    def pose(self) -> str:
        self._release()
        self.task_name = sorted(self.tasks)[self.rng.randrange(len(self.tasks))]
        self.commands, self.failures = [], 0
        self.machine = self._start(self.current)
        if self.machine.run(HAS_PYTEST, self.command_seconds).exit_code:
            self._check_tests()
        return self.current.instruction

    @property
    def current(self) -> TerminalTask:
        return self.tasks[self.task_name]

    def describe(self) -> dict[str, Any]:
        return {"task": self.task_name}

    @tool
    def bash(self, command: str, timeout: float = 0.0) -> str:
        """Run a command in the shell and return its output. Folder and exported variables are kept.

        command: one or more lines of bash
        timeout: seconds, 30 if not given
        """
        assert self.machine is not None
        if self.max_failures is not None and self.failures >= self.max_failures:
            return f"{ERROR}{self.failures} commands have failed; no more are run"
        seconds = min(timeout, MAX_COMMAND_SECONDS) if timeout > 0 else self.command_seconds
        try:
            done = self.machine.run(command, seconds)
        except MachineError as error:
            raise ToolError(str(error)) from error
        self.commands.append((command, seconds))
        self.failures += done.exit_code != 0
        if done.is_timeout:
            return f"{ERROR}stopped after {seconds:g} s\n{done.output}"
        return (
            f"{ERROR}exit code {done.exit_code}\n{done.output}" if done.exit_code else done.output
        )

    def respond(self, action: str) -> Turn:
        """The policy is done: copy the tests to the machine and run them."""
        assert self.machine is not None
        output = self._test(self.machine, self.current)
        if not has_summary(output):
            self._check_tests()  # raises, unless it is the policy's work that keeps them from running
        results = outcomes(output)
        names = self.current.weights or dict.fromkeys(
            defined_tests(self.current.tests) or results, 1.0
        )
        results = {name: results.get(name, False) for name in names}
        earned = score(results, names)
        if self.grade == "all":
            earned = float(earned == 1.0)
        passed = sum(results.values())
        info = {"tests_passed": passed, "tests_failed": len(results) - passed, "tests": results}
        self._release()
        return Turn(reward=earned, terminated=True, info=info)

    def demonstrate(self, rng: random.Random) -> Trace:
        """The author's solution as one command, its output on another machine, and the end."""
        solution, twin = self.current.solution(), self.fork()
        try:
            output = twin.bash(solution)
        finally:
            twin.close()
        call, result = f"<bash>{solution}</bash>", f"<result>{output}</result>"
        return [(Author.POLICY, call), (Author.ENV, result), (Author.POLICY, "Done.")]

    def sample_random_action(self) -> str:
        return self.action_rng().choice(("Done.", "I am done."))

    def fork(self) -> Self:
        machine, self.machine = self.machine, None
        try:
            twin = super().fork()
        finally:
            self.machine = machine
        twin._repeat()
        return twin

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._release()
        super().set_state(state)
        self.commands = [(command, seconds) for command, seconds in self.commands]
        self._repeat()

    def close(self) -> None:
        self._release()

    def _repeat(self) -> None:
        """A machine in the state that the commands so far led to, if the episode goes on."""
        if not self.is_over:
            self.machine = self._start(self.current)
            for command, seconds in self.commands:
                self.machine.run(command, seconds)

    def _start(self, task: TerminalTask) -> Machine:
        program = self.program or [container_program() or SANDBOX]
        if program == [SANDBOX]:
            if self.network or self.run_args:
                raise MachineError(
                    "network and run_args are for containers, and this machine would be a sandbox; "
                    "install docker or podman, or leave them out"
                )
            return SandboxMachine(task, memory_mb=self.memory_mb)
        limits = {"network": self.network, "memory_mb": self.memory_mb}
        return Container(task, program, options=self.run_args, **limits)

    def _check_tests(self) -> None:
        """MachineError if the tests of the task do not run on a machine that the policy has not touched:
        every attempt would fail, also one that has solved it."""
        task = self.current
        key = str(task.folder), " ".join(self.program)
        if key in _gradable:
            return
        machine = self._start(task)
        try:
            output = self._test(machine, task)
        finally:
            machine.close()
        if not has_summary(output):
            raise MachineError(
                f"the tests of task {task.name!r} cannot run on its machine: {task.runner.name} printed no "
                f"summary of pytest, but {output.strip()[-200:]!r}. Every attempt would earn 0. Install "
                "pytest: in the Dockerfile, or here for the sandbox (pip install pytest); or give "
                "network=True if the tests install it themselves"
            )
        _gradable.add(key)

    def _test(self, machine: Machine, task: TerminalTask) -> str:
        """What the task's tests print on a machine."""
        if task.tests.is_dir():
            machine.copy(task.tests, TESTS)
        machine.copy(task.runner, f"{TESTS}/{task.runner.name}")
        command = (
            f"export TEST_DIR={TESTS}; $(command -v bash || echo sh) {TESTS}/{task.runner.name}"
        )
        return machine.run(command, task.test_seconds, TEST_OUTPUT).output

    def _release(self) -> None:
        machine, self.machine = self.machine, None
        if machine is not None:
            machine.close()


def _part(
    tasks: list[TerminalTask], split: str, holdout: bool, where: str | Path
) -> list[TerminalTask]:
    """The tasks of a split; without `holdout` all of them are in both."""
    found = [one for one in tasks if not holdout or split_of(one.name) == split]
    if not found:
        raise ValueError(
            f"data={str(where)!r}: none of its {len(tasks)} tasks is in split={split!r} with "
            "holdout=True (one in ten is held out, by its name); name folders of your own instead"
        )
    return found
