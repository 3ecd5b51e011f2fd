"""A script as an ordinary user, also if root runs the tests in a folder that nobody else may read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SYSTEM_PYTHON = "/usr/bin/python3"
NOBODY = 65534
USER = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
PROBE = "import sys; assert sys.version_info >= (3, 11)"


def run_as_ordinary_user(script: str, root: Path = ROOT) -> str:
    """The output of a script that imports the sandbox from below `root`; root becomes another user for it."""
    if os.geteuid() != 0:
        return _run(sys.executable, script, root)
    if not Path(SYSTEM_PYTHON).exists() or not _succeeds(PROBE):
        pytest.skip("needs a Python of 3.11 that every user may run")
    with _readable(root) as folder:
        return _run(SYSTEM_PYTHON, script, folder, **USER)


@contextmanager
def _readable(root: Path) -> Iterator[Path]:
    """A folder with the package that the other user may read: `root`, or a copy (/root has mode 0700)."""
    if _reads(root):
        yield root
        return
    folder = Path(tempfile.mkdtemp(prefix="graft-readable-"))
    try:
        folder.chmod(0o755)
        if not _reads(folder.parent, "."):
            pytest.skip(f"other users may read neither {root} nor {folder.parent} (TMPDIR)")
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root / "graft_sandbox", folder / "graft_sandbox", ignore=ignored)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield folder
    finally:
        shutil.rmtree(folder)


def _reads(folder: Path, name: str = "graft_sandbox/inside/host.py") -> bool:
    return _succeeds(f"import os; os.stat({str(folder / name)!r}).st_size", **USER)


def _succeeds(code: str, **options: object) -> bool:
    command = [SYSTEM_PYTHON, "-c", code]
    return not subprocess.run(command, capture_output=True, cwd="/", **options).returncode


def _run(python: str, script: str, root: Path, **options: object) -> str:
    code = f"import sys\nsys.path.insert(0, {str(root)!r})\n{script}"
    command = [python, "-B", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=120, **options)
    if "does not work here" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return done.stdout
