"""Links in folders of strangers: a file that is a link to yours would be copied into an export or a report.

model/chat_template.jinja -> /home/me/.ssh/id_rsa                    refused
models--a--b/snapshots/c1/config.json -> ../../blobs/9f2e            the hub's cache
model/chat_template.jinja -> chat.jinja                              inside of the folder
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from graft.trust.belongings import SETTINGS
from graft.trust.ownership import why_not_own

SMALL = re.compile(r".+\.(json|jsonl|jinja|model|tiktoken|txt|md|ya?ml)")
"""Names of files that are copied or quoted; weights are parsed, and may lie elsewhere."""
WEIGHTS = (".safetensors", ".gguf")
FOLDERS = ("adapter", "additional_chat_templates", "evaluations")
"""Folders inside a checkpoint, a model or a run whose files are copied or quoted too."""


class OutsideLink(ValueError):
    """A link that leads out of the folder that it lies in."""


def check_links(folder: Path) -> None:
    """Refuse small files of a model, checkpoint or run that lie elsewhere."""
    if not folder.is_dir():
        return
    inside = [folder / name for name in FOLDERS]
    # a folder that is a link itself is judged, not entered
    inner = (path for one in inside if not one.is_symlink() for path in one.glob("*"))
    _refuse_outside(
        folder,
        (
            path
            for path in sorted([*folder.iterdir(), *inner])
            if SMALL.fullmatch(path.name) or path in inside
        ),
    )


def check_shown_run(run: Path) -> None:
    """Refuse links out of a run: what is shown and saved of it would be another file of the user's.

    Folders of one's own run may lie on another disk.
    """
    settings = run / SETTINGS
    is_own = not settings.is_symlink() and not why_not_own(settings)
    _refuse_outside(
        run,
        (
            path
            for path in _links(run)
            if path.suffix not in WEIGHTS and not (is_own and path.is_dir())
        ),
    )


def _links(folder: Path) -> Iterator[Path]:
    """All links in a folder and its folders; none is followed."""
    folders = [str(folder)]  # of a stranger: they may be nested deeper than functions can be
    while folders:
        try:
            entries = [*os.scandir(folders.pop())]
        except OSError:  # gone, or closed to this user: nothing of it is shown
            continue
        yield from (Path(entry.path) for entry in entries if entry.is_symlink())
        folders += (entry.path for entry in entries if entry.is_dir(follow_symlinks=False))


def _refuse_outside(folder: Path, paths: Iterable[Path]) -> None:
    root = folder.resolve()
    for path in paths:
        try:
            target = path.resolve()
        except (OSError, RuntimeError):  # links in a circle: whoever reads it says so
            continue
        if not target.is_relative_to(root) and not _is_blob(target):
            raise OutsideLink(
                f"'{path}' is a link to '{target}', outside of its folder: it would be read and copied as "
                "if it were the folder's own. If it belongs to it, put a copy there: "
                f"cp --remove-destination '{target}' '{path}'"
            )


def _is_blob(file: Path) -> bool:
    """Whether it lies in a hub cache, which holds files of models under their hashes."""
    return file.parent.name == "blobs" and file.parent.parent.name.startswith("models--")
