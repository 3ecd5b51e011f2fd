"""Task folders of either format: one of them, or many in a folder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from graft_envs.terminal import harbor, terminal_bench
from graft_envs.terminal.task import TaskFileError, TerminalTask

FORMATS = (terminal_bench, harbor)
FILES = tuple(form.FILE for form in FORMATS)


def read_tasks(where: str | Path, variables: Collection[str] = ()) -> list[TerminalTask]:
    """The task in this folder, or the tasks in the folders below it, by name.

    variables: names of those of this computer that a task may read.
    """
    root = Path(where).expanduser()
    if not root.is_dir():
        raise TaskFileError(f"data={str(where)!r}: there is no such folder")
    is_task = any((root / name).exists() for name in FILES)
    folders = [root] if is_task else sorted(path for path in root.iterdir() if path.is_dir())
    tasks = [
        form.read_task(folder, variables)
        for folder in folders
        for form in FORMATS
        if (folder / form.FILE).exists()
    ]
    if not tasks:
        raise TaskFileError(
            f"data={str(where)!r}: neither it nor a folder in it has a file that describes a task: "
            f"{FILES[0]} of terminal-bench, or {FILES[1]} of Harbor"
        )
    return tasks
