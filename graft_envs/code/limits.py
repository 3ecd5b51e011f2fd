"""What a stranger's settings may not ask of the sandbox."""

from __future__ import annotations

from graft.trust import check_program


def check_sandbox(sandbox: str, interpreter: str | None = "") -> None:
    """NotTrusted if a stranger's settings are in use and switch the sandbox off or name a program."""
    if sandbox == "none":
        check_program('sandbox="none", in which a policy\'s code can do all that you can')
    if interpreter:
        check_program(f"the interpreter {interpreter!r}", interpreter)
