"""How a task's tests run on a machine, and how it is known that they could not."""

from __future__ import annotations

import re
import shlex

from graft_envs.terminal.machine import ROOT, CommandResult, Machine
from graft_envs.terminal.task import Script

TEST_OUTPUT = 1 << 20
MAX_FAULT = 600
"""Characters of the end of an output in messages."""
_MISSING = re.compile(
    r"\b(?:pytest|uvx?)'?: (?:command )?not found|No module named '?pytest\b|can't open file '/tests/"
)
"""What shells and Python print if there is no test runner."""


def run_script(machine: Machine, script: Script) -> CommandResult:
    """Copy a script to the machine and run it, in a new shell unless it asks for the policy's."""
    for source, target in script.copies:
        machine.copy(source, target)
    path, pairs = shlex.quote(script.path), script.variables.items()
    machine.execute(f"chmod +x {path}", script.seconds, user=ROOT)
    command = f"{script.shell} {path}".lstrip()
    if script.in_policys_shell:
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in pairs)
        return machine.run(exports + command, script.seconds, TEST_OUTPUT)
    return machine.execute(
        command, script.seconds, TEST_OUTPUT, variables=script.variables, user=script.user
    )


def lacks_runner(output: str) -> bool:
    """Whether tests printed that their runner is not installed."""
    return _MISSING.search(output) is not None


def end_of(done: CommandResult) -> str:
    """How a script ended, and the end of what it printed."""
    how = "stopped at its time limit" if done.is_timeout else f"exit code {done.exit_code}"
    return f"{how}, after {done.output.strip()[-MAX_FAULT:]!r}"
