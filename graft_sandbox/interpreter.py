"""The Python that runs a policy's code: graft's own, or another one, such as that of a conda environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

PACKAGE_FOLDERS = ("site-packages", "dist-packages")
OLDEST = (3, 11)
ASK_SECONDS = 30.0
ASK = (
    "import json, sys; print(json.dumps([sys.version_info[:2], getattr(sys, '_base_executable', None) "
    "or sys.executable, [sys.base_prefix, sys.base_exec_prefix], sys.path]))"
)


class Interpreter(NamedTuple):
    executable: str
    prefixes: tuple[str, ...]
    """Where it is installed."""
    packages: list[str]
    """The folders of its packages; of a virtual environment those that its programs import from."""


def own_interpreter() -> Interpreter:
    executable = getattr(sys, "_base_executable", None) or sys.executable
    return _make_interpreter(executable, [sys.base_prefix, sys.base_exec_prefix], sys.path)


def find_interpreter(path: str) -> str:
    """The program that a user named, as a whole path; ValueError if there is none that can be used.

    It runs outside the sandbox, once, to tell where its packages are.
    """
    program = os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111
    if not os.access(program, os.X_OK) or not Path(program).is_file():
        raise ValueError(
            f"interpreter={path!r} is no program; give that of an environment, such as "
            "/opt/conda/envs/NAME/bin/python"
        )
    inspect_interpreter(program)
    return program


@lru_cache(maxsize=16)
def inspect_interpreter(program: str) -> Interpreter:
    try:
        asked = subprocess.run(
            [program, "-I", "-c", ASK],
            capture_output=True,
            check=True,
            timeout=ASK_SECONDS,
            env={"PATH": "/usr/bin:/bin"},
        )
        version, executable, prefixes, paths = json.loads(asked.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ValueError(f"interpreter={program!r} is no Python: {str(error)[:200]}") from error
    if tuple(version) < OLDEST:
        raise ValueError(
            f"interpreter={program!r} is Python {version[0]}.{version[1]}, and the sandbox runs in "
            f"{OLDEST[0]}.{OLDEST[1]} or later; make such an environment (conda create -n NAME python=3.12)"
        )
    return _make_interpreter(executable, prefixes, paths)


def _make_interpreter(executable: str, prefixes: list[str], paths: list[str]) -> Interpreter:
    # not the user's own folders, which are also on sys.path
    packages = [path for path in paths if os.path.basename(path) in PACKAGE_FOLDERS]  # noqa: PTH119
    readable = [path for path in packages if os.access(path, os.R_OK)]
    return Interpreter(executable, tuple(dict.fromkeys(prefixes)), readable)
