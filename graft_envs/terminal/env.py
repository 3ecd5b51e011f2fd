"""Work in a shell until the task is done; then the task's own tests grade the machine."""

from __future__ import annotations

import logging
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Self

from graft.envs.base import BaseEnv, Trace
from graft.envs.splits import check_split, split_of
from graft.envs.task_check import TaskCheck
from graft.tools.errors import ERROR, ToolError
from graft.tools.function import tool
from graft.types import Author, Turn
from graft_envs.terminal.container import Container, container_program
from graft_envs.terminal.formats import read_tasks
from graft_envs.terminal.machine import Machine, MachineError
from graft_envs.terminal.sandboxed import SandboxMachine
from graft_envs.terminal.task import MachineVerdict, Script, TerminalTask
from graft_envs.terminal.verifying import end_of, run_script

COMMAND_SECONDS = 30.0
MAX_COMMAND_SECONDS = 600.0
AGENT_SECONDS = 86_400.0
"""That an agent's command may take if its task has no limit: agent.seconds ends it before."""
AGENT_FOLDER = "/agent"
SANDBOX = "sandbox"
GRADES = ("share", "all")
log = logging.getLogger("graft")
_gradable: set[tuple[str, str]] = set()
"""Tasks and programs whose tests are known to run, in this process."""


class TerminalEnv(BaseEnv):
    """A shell on a machine of its own; calls of the tool `bash`, then a turn without a call.

        env     Write the number of lines of data.txt to count.txt.
        policy  <bash>wc -l < data.txt > count.txt; cat count.txt</bash>
        env     <result>12</result>
        policy  Done.                    the tests run: the reward is the weight that passed

    `data` is a task folder of terminal-bench or Harbor, or a folder of them; with `holdout` one in ten,
    chosen by name, is in split "test" and the others in "train". `program` is the container command with its
    global options ("docker", "podman --runtime=runc"), or "sandbox" for graft's own (`sandboxed.py`);
    empty: the first of docker, podman and sandbox that works. `run_args` are options of `docker run`.
    `grade="all"` earns 1 only if every test passes, as in terminal-bench. After `max_failures` commands
    with an exit code other than 0 no more are run. `network` is as the task says, unless it is given;
    many published tasks need it to install pytest. `variables` names those of this computer that a
    task may read. The content of `agent_folder` is at /agent if an agent's command attempts the task.
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
        network: bool | None = None,
        memory_mb: int = 2048,
        command_seconds: float = COMMAND_SECONDS,
        max_failures: int | None = None,
        grade: str = "share",
        variables: Sequence[str] = (),
        agent_folder: str | Path = "",
    ) -> None:
        super().__init__()
        if grade not in GRADES:
            raise ValueError(f"grade={grade!r}: must be one of {', '.join(GRADES)}")
        self.split = check_split(split)
        tasks = _part(read_tasks(data, variables), split, holdout, data)
        self.tasks = {task.name: task for task in tasks}
        _note(tuple(sorted(Counter(note for task in tasks for note in task.notes).items())))
        self.program, self.run_args = program.split(), tuple(run_args)
        if self.program and self.program != [SANDBOX] and not shutil.which(self.program[0]):
            raise ValueError(
                f"program={program!r}: there is no {self.program[0]!r} on this machine; install it, or give "
                f"docker, podman or {SANDBOX}, or nothing for the first that works"
            )
        self.network, self.memory_mb = network, memory_mb
        self.command_seconds, self.max_failures, self.grade = command_seconds, max_failures, grade
        self.agent_folder = Path(agent_folder).expanduser() if agent_folder else None
        if self.agent_folder is not None and not self.agent_folder.is_dir():
            raise ValueError(f"agent_folder={str(agent_folder)!r}: there is no such folder")
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
        probe = self.current.probe
        if probe and self.machine.run(probe, self.command_seconds).exit_code:
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
        verdict = self.current.verifier(self.machine)
        if verdict.fault:
            self._check_tests()  # raises, unless it is the policy's work that keeps them from running
        earned = float(verdict.reward >= 1.0) if self.grade == "all" else verdict.reward
        self._release()
        return Turn(reward=earned, terminated=True, info=dict(verdict.info))

    def run_agent(
        self, words: Sequence[str], variables: Mapping[str, str], url: str
    ) -> tuple[int, str]:
        """Run an agent's command on the machine; the next step grades what it did there.

        Returns exit code and output. One that is stopped at the task's own limit has ended well.
        """
        assert self.machine is not None
        if self.agent_folder is not None:
            self.machine.copy(self.agent_folder, AGENT_FOLDER)
        seconds = self.current.agent_seconds or AGENT_SECONDS
        done = self.machine.attempt(words, variables, url, seconds)
        if done.is_timeout:
            return 0, f"{done.output}\n[stopped after {seconds:g} s, the task's limit]"
        return done.exit_code, done.output

    def check_tasks(self) -> Iterator[TaskCheck]:
        """Try the solution of every task, and doing nothing, each on a machine of its own."""
        for name, task in sorted(self.tasks.items()):
            try:
                _, nothing = self._try(task, None)
                if nothing.fault:
                    yield TaskCheck(name, fault=nothing.fault)
                elif task.solution is None:
                    yield TaskCheck(name, nop=nothing.reward)
                else:
                    end, solved = self._try(task, task.solution)
                    fault = "" if solved.reward >= 1.0 else solved.fault or f"solution: {end}"
                    yield TaskCheck(name, solved.reward, nothing.reward, fault)
            except MachineError as error:
                yield TaskCheck(name, fault=str(error))

    def demonstrate(self, rng: random.Random) -> Trace:
        """The author's solution as one command, its output on another machine, and the end."""
        solution, twin = self.current.solution_text(), self.fork()
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
            return SandboxMachine(task.machine, memory_mb=self.memory_mb)
        limits = {"network": self.network, "memory_mb": self.memory_mb}
        return Container(task.machine, program, name=task.name, options=self.run_args, **limits)

    def _try(self, task: TerminalTask, solution: Script | None) -> tuple[str, MachineVerdict]:
        """How a solution ended on a new machine, and what the tests say about that machine."""
        machine = self._start(task)
        try:
            end = end_of(run_script(machine, solution)) if solution is not None else ""
            return end, task.verifier(machine)
        finally:
            machine.close()

    def _check_tests(self) -> None:
        """MachineError if the tests of the task do not run on a machine that the policy has not touched:
        every attempt would fail, also one that has solved it."""
        task = self.current
        key = str(task.machine.folder), " ".join(self.program)
        if key in _gradable:
            return
        _, verdict = self._try(task, None)
        if verdict.fault:
            raise MachineError(
                f"the tests of task {task.name!r} cannot run on its machine: {verdict.fault}. No attempt "
                "at it can be graded. Install what they need in the Dockerfile, or here for the sandbox "
                "(pip install pytest); or give network=True if the tests install it themselves"
            )
        _gradable.add(key)

    def _release(self) -> None:
        machine, self.machine = self.machine, None
        if machine is not None:
            machine.close()


@cache
def _note(counts: tuple[tuple[str, int], ...]) -> None:
    """Say once what tasks ask for and do not get."""
    for note, number in counts:
        log.warning("terminal tasks: %s (in %d)", note, number)


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
