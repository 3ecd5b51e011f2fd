"""Find runs on the disk: one by its name, or all runs in a folder."""

from __future__ import annotations

from pathlib import Path

from graft.config import ConfigError
from graft.runs.record import RunRecord
from graft.train.run_dir.names import is_run, named


def find_run(given: str) -> RunRecord:
    """The run with this folder, or with this name under `runs`."""
    path = named(given)
    if is_run(path):
        return RunRecord(path)
    if not path.exists():
        raise ConfigError(f"no run '{given}': there is no such folder, nor one in runs/")
    if inside := find_runs(path):
        names = ", ".join(str(run) for run in inside[:5])
        more = f" and {len(inside) - 5} more" if len(inside) > 5 else ""
        raise ConfigError(f"'{given}' is a folder of runs ({names}{more}); name one of them")
    raise ConfigError(
        f"'{given}' is no run: it holds neither config.yaml nor metrics.jsonl, which "
        "`graft train` writes"
    )


def find_runs(folder: Path, depth: int = 3) -> list[Path]:
    """Runs in a folder and in folders of it, by name; a run holds no other runs."""
    if is_run(folder):
        return [folder]
    if not depth:
        return []
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return []
    inner = [one for one in entries if not one.name.startswith(".") and one.is_dir()]
    return [run for one in inner for run in find_runs(one, depth - 1)]
