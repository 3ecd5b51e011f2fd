"""The python tool: run the policy's code in the sandbox, and answer like a notebook.

"x = 6\nx * 7"      ->  "42"
"print('a'); 1/0"   ->  "Error: ZeroDivisionError: division by zero\na\nTraceback ..."
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

from graft.tools.errors import ERROR
from graft_envs.code.limits import check_sandbox
from graft_sandbox import SandboxOutcome, SandboxSession, choose, run_python
from graft_sandbox.hosts import PYTHON
from graft_sandbox.interpreter import find_interpreter

RESTARTED = "(The interpreter was restarted: names from earlier calls are gone.)"
NOTHING = "(no output)"


class PythonTool:
    """Runs Python code and answers with its output, then the value of its last expression.

    `keep_state` makes it a notebook: names stay from call to call, and a fork of the tool has the same
    names, because it runs the same cells again at its first call. Without it every call is a separate
    program, and one tool serves any number of envs.
    """

    name = "python"
    blocking = True
    description = (
        "Runs Python code in a sandbox without network and answers with what it prints, followed by "
        "the value of the last line if that is an expression."
    )
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The Python code to run."}},
        "required": ["code"],
    }

    def __init__(
        self,
        timeout: float = 5.0,
        sandbox: str = "auto",
        keep_state: bool = False,
        keep_error_last_line: bool = False,
        max_output: int = 65536,
        memory_mb: int = 1024,
        concurrency: int | None = None,
        interpreter: str = "",
    ) -> None:
        """`interpreter` is the Python that runs the code, such as that of a conda environment with its
        packages (/opt/conda/envs/NAME/bin/python); "": the one that runs graft."""
        if timeout <= 0 or max_output < 1 or memory_mb < 1:
            raise ValueError(
                f"timeout={timeout}, max_output={max_output} and memory_mb={memory_mb} must be "
                "positive: no code could run"
            )
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency={concurrency} would let no call through; None: no limit")
        check_sandbox(sandbox, interpreter)
        choose(sandbox)  # fails now on a machine without isolation, not at the first call
        self.timeout, self.max_output, self.memory_mb = timeout, max_output, memory_mb
        self.limits: dict[str, Any] = {
            "timeout": timeout,
            "sandbox": sandbox,
            "memory_mb": memory_mb,
            "max_output": max_output,
        }
        self.interpreter = find_interpreter(interpreter) if interpreter else ""
        self.keep_state = self.is_stateful = keep_state
        self.keep_error_last_line = keep_error_last_line
        self.concurrency = concurrency  # counted over all envs by graft.tools.calling
        self._cells: list[str] = []
        """The code that made the current names: every completed cell."""
        self._session: SandboxSession | None = None

    def __call__(self, content: str) -> str:
        if not self.keep_state:
            return self._text(self.run(content))
        session = self._session  # the tool may be closed during an abandoned call
        if session is None:
            session = self._session = self._replay()
        outcome = session.run(content)
        if outcome.is_restarted and self._cells:
            # the sandbox was killed from outside: restore the policy's names
            session.close()
            session = self._session = self._replay()
            outcome = session.run(content)
        if session.is_alive:
            self._cells.append(content)
        else:
            self._cells.clear()
        return self._text(outcome)

    def run(self, code: str, stdin: str = "") -> SandboxOutcome:
        """Run a separate program, without the kept names, and return more than its text."""
        return run_python(code, stdin, echo=True, interpreter=self.interpreter, **self.limits)

    def fork(self) -> PythonTool:
        """An independent tool with the same names; without kept state, this one."""
        if not self.keep_state:
            return self
        twin = copy(self)
        twin._cells, twin._session = list(self._cells), None
        return twin

    def __deepcopy__(self, memo: Any) -> PythonTool:
        return self.fork()

    def reset(self) -> None:
        """Forget every name."""
        self.set_state({"cells": []})

    def get_state(self) -> dict[str, Any]:
        """The cells that make the names, as JSON."""
        return {"cells": list(self._cells)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.close()
        self._cells = list(state["cells"])

    def close(self) -> None:
        """End the interpreter, if there is one. A later call restores the names."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _replay(self) -> SandboxSession:
        session = SandboxSession(**self.limits, view=self.interpreter or PYTHON)
        for cell in self._cells:
            session.run(cell)
        return session

    def _text(self, outcome: SandboxOutcome) -> str:
        """The answer to the policy."""
        note = RESTARTED if outcome.is_restarted else ""
        if outcome.ok:
            output = (outcome.stdout + outcome.stderr).rstrip("\n")
            return "\n".join(filter(None, (note, output))) or NOTHING
        trace = outcome.stderr.rstrip("\n")
        last_line = trace.rpartition("\n")[2]
        if outcome.is_timeout:
            why = f"no end after {self.timeout:g} s, stopped"
        elif outcome.is_output_cut:
            why = f"more than {self.max_output} bytes of output, stopped"
        elif outcome.is_out_of_memory and not last_line:
            why = f"more than {self.memory_mb} MB of memory, stopped"
        elif outcome.exit_code < 0:
            why = f"ended by signal {-outcome.exit_code}"
        else:
            why = last_line or f"exit code {outcome.exit_code}"
        parts = [ERROR + why, note, outcome.stdout.rstrip("\n")]
        if not self.keep_error_last_line:
            parts.append(trace)
        return "\n".join(part for part in parts if part)
