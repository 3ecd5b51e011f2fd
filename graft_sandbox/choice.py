"""The kinds of isolation that work on this machine: each is tried once, and the strongest is chosen.

bubblewrap  bwrap builds the file tree; in it each call has its own pid and mount namespaces
namespaces  the same, built by graft
landlock    no namespaces: Landlock for files, seccomp for network and processes, one process
none        limits on time and memory only; used only if the user names it
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from typing import NamedTuple

from graft_sandbox import hosts
from graft_sandbox.hosts import SandboxError, SandboxUnavailable
from graft_sandbox.running import run_in

STRONGEST_FIRST = ("bubblewrap", "namespaces", "landlock")
NONE = "none"

TRIAL = """
import os, socket
leaks = []
try:
    leaks.append("opens " + open(%r).name)
except OSError:
    pass
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    try:
        socket.socket(socket.AF_INET, kind)
        leaks.append("opens a socket")
    except OSError:
        pass
try:
    open("trial", "w").write("x")
except OSError as error:
    leaks.append(f"cannot write to its own folder: {error}")
print(", ".join(leaks) or "sound")
"""


class Method(NamedTuple):
    name: str
    works: bool
    why: str
    """The result of the trial, or what is missing."""


_tried: dict[str, Method] = {}
_grouped: set[str] = set()
"""The methods whose calls have control groups here."""


def methods() -> list[Method]:
    """Every method, strongest first, each tried on this machine."""
    return [probe(name) for name in STRONGEST_FIRST]


def choose(name: str = "auto") -> str:
    """The strongest method that works, or `name` if that one does.

    SandboxUnavailable if none works; ValueError for an unknown name.
    """
    if name == NONE:
        if sys.platform != "linux":
            raise SandboxUnavailable(f"sandbox {name!r} needs Linux, this is {platform.system()}")
        return NONE
    if name == "auto":
        for candidate in STRONGEST_FIRST:
            if probe(candidate).works:
                return candidate
        tried = "; ".join(f"{method.name}: {method.why}" for method in methods())
        raise SandboxUnavailable(
            f"no isolation works on this machine, so the policy's code is not run ({tried}). "
            'sandbox="none" runs it unprotected: it can then read and delete your files.'
        )
    if name not in STRONGEST_FIRST:
        known = ", ".join(("auto", *STRONGEST_FIRST, NONE))
        raise ValueError(f"unknown sandbox {name!r}; known: {known}")
    if not (method := probe(name)).works:
        raise SandboxUnavailable(f"sandbox {name!r} does not work here: {method.why}")
    return name


def described(name: str) -> str:
    """ "namespaces", or "namespaces + cgroup" if each of its calls has a control group here."""
    return f"{name} + cgroup" if name in _grouped else name


def status() -> tuple[str, list[Method]]:
    """The method that would be chosen, "" if none works, and the result of trying each."""
    tried = methods()
    return next((described(method.name) for method in tried if method.works), ""), tried


def probe(name: str) -> Method:
    """The result of trying a method, once per process; threads that come meanwhile try it too."""
    if name not in _tried:
        _tried[name] = _try(name)
    return _tried[name]


def _try(name: str) -> Method:
    if sys.platform != "linux":
        return Method(name, False, f"it needs Linux, this is {platform.system()}")
    if platform.machine() not in ("x86_64", "aarch64"):
        return Method(name, False, f"no system-call filter for {platform.machine()}")
    try:
        host = hosts.obtain(name)
        # anybody may read it, and it is not part of the Python installation, as this module may be
        with tempfile.NamedTemporaryFile(prefix="graft-trial-") as secret:
            os.fchmod(secret.fileno(), 0o644)
            outcome = run_in(host, TRIAL % os.path.realpath(secret.name), timeout=20.0)
    except SandboxError as error:
        hosts.close_all(name)
        return Method(name, False, str(error))
    report = (outcome.stdout or outcome.stderr).strip() or f"exit code {outcome.exit_code}"
    if report != "sound":
        hosts.close_all(name)
        return Method(name, False, f"a trial program {report}")
    why = "a trial program could neither read a file nor open a socket"
    if host.has_groups:
        _grouped.add(name)
        why += "; each call has a control group"
    return Method(name, True, why)
