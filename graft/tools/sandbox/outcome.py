"""The outcome of a run, and the errors of the sandbox itself."""

from __future__ import annotations

from dataclasses import dataclass

from graft.tools.errors import ToolError


class SandboxError(ToolError):
    """The sandbox failed; the code that it ran is not the cause."""


class SandboxUnavailable(SandboxError):
    """No kind of isolation works on this machine; the message lists what was tried."""


@dataclass(frozen=True, slots=True)
class SandboxOutcome:
    """The output of a program and how it ended.

    `print(1/0)` -> stdout "", stderr "Traceback ... ZeroDivisionError: division by zero",
    exit_code 1, ok False.
    """

    stdout: str
    stderr: str
    exit_code: int
    """Negative: the signal that ended it."""
    seconds: float
    is_timeout: bool = False
    is_out_of_memory: bool = False
    is_output_cut: bool = False
    """It printed more than the limit and was stopped."""
    is_restarted: bool = False
    """In a SandboxSession: an earlier run ended the interpreter, so this one started without names."""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not (self.is_timeout or self.is_output_cut)
