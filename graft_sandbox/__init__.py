"""Run untrusted code without access to network, files and other processes.

run_python("print(6 * 7)").stdout          "42\\n"
SandboxSession().run("x = 1")              names stay between its runs
methods()                                  the kinds of isolation that work on this machine
"""

from __future__ import annotations

from graft_sandbox.choice import Method, choose, described, methods, status
from graft_sandbox.hosts import SandboxError, SandboxUnavailable
from graft_sandbox.run import SandboxSession, run_python
from graft_sandbox.running import SandboxOutcome

__all__ = [
    "Method",
    "SandboxError",
    "SandboxOutcome",
    "SandboxSession",
    "SandboxUnavailable",
    "choose",
    "described",
    "methods",
    "run_python",
    "status",
]
