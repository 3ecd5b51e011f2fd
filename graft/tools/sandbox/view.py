"""The files that code in the sandbox may read: the Python installation and its libraries."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

SYSTEM = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
    "/etc/localtime",
)
SCRATCH = "/scratch"
TMP = "/tmp"
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
SHARED_PREFIXES = ("/", "/usr", "/usr/local")  # hold far more than Python


class View(NamedTuple):
    readable: list[str]
    """Folders and files, none below another."""
    links: dict[str, str]
    """Symbolic links that must exist too: path -> target."""
    site: list[str]
    """The folders of installed packages."""
    executable: str


def python_view() -> View:
    """The view for the running interpreter. Of a virtual environment only its packages are visible."""
    executable = getattr(sys, "_base_executable", None) or sys.executable
    # not the user's own folders, which are also on sys.path
    packages = [path for path in sys.path if os.path.basename(path) in PACKAGE_FOLDERS]  # noqa: PTH119
    packages = [path for path in packages if os.access(path, os.R_OK)]
    wanted = [*SYSTEM, executable, *packages]
    for prefix in {sys.base_prefix, sys.base_exec_prefix}:
        if prefix in SHARED_PREFIXES:
            wanted += [f"{prefix}/lib", f"{prefix}/lib64"]
        else:
            wanted.append(prefix)
    readable: set[str] = set()
    links: dict[str, str] = {}
    for path in wanted:
        if not os.access(path, os.R_OK):
            continue
        real = os.path.realpath(path)
        readable.add(real)
        if real != path:
            links[path] = real
    outermost = sorted(path for path in readable if not _is_below(path, readable))
    links = {path: real for path, real in links.items() if not _is_below(path, {*outermost})}
    if not any(path.startswith(f"{TMP}/") for path in (*outermost, *links)):
        links[TMP] = SCRATCH  # else Python is installed there, and /tmp is a real folder
    return View(outermost, links, packages, executable)


def _is_below(path: str, folders: set[str]) -> bool:
    return any(str(parent) in folders for parent in Path(path).parents)
