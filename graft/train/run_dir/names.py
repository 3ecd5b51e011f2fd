"""Runs by name, wherever a command takes a run: `graft view quickstart` is `graft view runs/quickstart`.

named("quickstart")                Path("runs/quickstart"), where ./quickstart is neither run nor model
short(Path("runs/quickstart"))     "quickstart"
"""

from __future__ import annotations

import shlex
from pathlib import Path

RUNS = "runs"
"""The folder in which runs are found by name: the default of run.dir."""


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("metrics.jsonl", "config.yaml"))


def named(given: str) -> Path:
    """The path of a run, checkpoint or model, else the one of that name in `runs`."""
    path, inside = Path(given), Path(RUNS) / given
    is_model = path.is_file() or (path / "config.json").is_file() or (path / "checkpoints").is_dir()
    if is_model or is_run(path):
        return path
    is_meant = is_run(inside) or (inside.exists() and not path.exists())
    return inside if given and is_meant else path


def short(path: Path) -> str:
    """The argument for a run in a command typed here: its name in `runs`, else its path."""
    for above in (Path(RUNS), Path.cwd()):
        if path.absolute().is_relative_to(above.absolute()):
            text = str(path.absolute().relative_to(above.absolute()))
            if named(text).absolute() == path.absolute():
                return shlex.quote(text)
    return shlex.quote(str(path))
