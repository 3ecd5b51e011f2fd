"""What came of a run, and what can go wrong with the sandbox itself."""

from __future__ import annotations

from dataclasses import dataclass

from graft.tools.errors import ToolError


class SandboxError(ToolError):
    """The sandbox broke: not the doing of the code that it ran."""


class SandboxUnavailable(SandboxError):
    """This machine offers no isolation that works; the text says what was tried."""


@dataclass(frozen=True, slots=True)
class SandboxOutcome:
    """What a program printed and how it ended.

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
    """It printed more than it may, and was stopped."""
    is_restarted: bool = False
    """In a Session: an earlier run had ended the interpreter, so this one began without names."""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not (self.is_timeout or self.is_output_cut)
