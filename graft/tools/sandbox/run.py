"""Run a program in the sandbox and wait for it."""

from __future__ import annotations

import importlib.util
import re
from functools import lru_cache

from graft.tools.sandbox import hosts
from graft.tools.sandbox.choice import choose
from graft.tools.sandbox.hosts import HostDied, SandboxHost
from graft.tools.sandbox.outcome import SandboxError, SandboxOutcome
from graft.tools.sandbox.running import Running

ATTEMPTS = 3
"""A host may be killed under a call. The code has touched nothing outside, so it can run again."""

PRELOAD = {"numpy": "numpy.random", "sympy": "sympy"}
"""Slow to import and much used: code that names one is run in a host that has it already. Name ->
what the host imports; of numpy also the part that has a seed."""
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
    """Run `code` as a program of its own, shut off from everything.

    >>> run_python("print(int(input()) + 1)", "41").stdout
    '42\\n'

    It has no network, no files but an empty scratch folder that is gone afterwards, no other
    processes, `timeout` seconds by the clock, `memory_mb` of memory and `max_output` bytes of
    output. With `echo` the value of a last line that is an expression is printed, as at a prompt.
    May be called from many threads at once.
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


def run_in(
    host: SandboxHost,
    code: str,
    stdin: str = "",
    timeout: float = 5.0,
    memory_mb: int = 1024,
    max_output: int = 65536,
    echo: bool = False,
) -> SandboxOutcome:
    """`run_python` in a host of one's own."""
    given = stdin.encode(errors="surrogatepass")
    with Running(host, code, given, echo=echo, timeout=timeout, memory_mb=memory_mb) as running:
        return running.finish(timeout, max_output)


def modules_named(code: str) -> tuple[str, ...]:
    """What to import for those of PRELOAD that the code mentions and that are installed."""
    return tuple(
        module
        for name, module in PRELOAD.items()
        if _NAMED[name].search(code) and _is_installed(name)
    )


@lru_cache
def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
