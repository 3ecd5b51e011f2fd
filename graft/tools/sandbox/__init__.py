"""Run code that nobody has read: shut off from network, files and processes, and cheap to call.

run_python("print(6 * 7)").stdout          "42\\n"
Session().run("x = 1"), .run("x + 1")      names live on between runs
methods()                                  which kinds of isolation work on this machine
"""

from __future__ import annotations

from graft.tools.sandbox.choice import Method, choose, methods
from graft.tools.sandbox.outcome import SandboxError, SandboxOutcome, SandboxUnavailable
from graft.tools.sandbox.run import run_python
from graft.tools.sandbox.session import SandboxSession

__all__ = [
    "Method",
    "SandboxError",
    "SandboxOutcome",
    "SandboxSession",
    "SandboxUnavailable",
    "choose",
    "methods",
    "run_python",
]
