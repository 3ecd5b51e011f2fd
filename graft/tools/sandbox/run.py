"""Run a program in the sandbox and wait for it."""

from __future__ import annotations

import importlib.util
import re
from functools import lru_cache

from graft.tools.sandbox import hosts
from graft.tools.sandbox.choice import choose
from graft.tools.sandbox.hosts import HostDied
from graft.tools.sandbox.outcome import SandboxError, SandboxOutcome
from graft.tools.sandbox.running import run_in

ATTEMPTS = 3
"""A host may be killed during a call. The code changed nothing outside, so it can run again."""

PRELOAD = {"numpy": "numpy.random", "sympy": "sympy"}
"""Packages that are slow to import: code that names one runs in a host that has imported it. Name ->
the module that the host imports; of numpy the part that has a seed."""
_NAMED = {name: re.compile(rf"\b{name}\b") for name in PRELOAD}


def run_python(
    code: str,
    stdin: str = "",
    *,
    timeout: float = 5.0,
    sandbox: str = "auto",
    memory_mb: int = 1024,
    max_output: int = 65536,
    echo: bool = False,
) -> SandboxOutcome:
    """Run `code` as a program in the sandbox.

    >>> run_python("print(int(input()) + 1)", "41").stdout
    '42\\n'

    It has no network, no files but an empty scratch folder that is removed afterwards, no other
    processes, `timeout` seconds by the clock, `memory_mb` of memory and `max_output` bytes of
    output. With `echo` the value of a last line that is an expression is printed, as at a prompt.
    Safe on many threads at once.
    """
    method = choose(sandbox)
    preload = modules_named(code)
    for attempt in range(ATTEMPTS):
        host = hosts.obtain(method, preload)
        try:
            return run_in(host, code, stdin, timeout, memory_mb, max_output, echo)
        except HostDied as error:
            hosts.discard(host)
            if attempt == ATTEMPTS - 1:
                raise SandboxError(f"the sandbox died {ATTEMPTS} times: {error}") from error
    raise AssertionError("unreachable")


def modules_named(code: str) -> tuple[str, ...]:
    """The modules of PRELOAD that the code names and that are installed."""
    return tuple(
        module
        for name, module in PRELOAD.items()
        if _NAMED[name].search(code) and _is_installed(name)
    )


@lru_cache
def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
