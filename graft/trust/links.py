"""Links in folders of strangers: a small file that is a link to yours would be copied into an export.

model/chat_template.jinja -> /home/me/.ssh/id_rsa                    refused
models--a--b/snapshots/c1/config.json -> ../../blobs/9f2e            the hub's cache
model/chat_template.jinja -> chat.jinja                              inside of the folder
"""

from __future__ import annotations

import re
from pathlib import Path

SMALL = re.compile(r".+\.(json|jsonl|jinja|model|tiktoken|txt|md|ya?ml)")
"""Names of files that are copied or quoted; weights are parsed, and may lie elsewhere."""
FOLDERS = ("adapter", "additional_chat_templates", "evaluations")
"""Folders inside a checkpoint, a model or a run whose files are copied or quoted too."""


class OutsideLink(ValueError):
    """A link that leads out of the folder that it lies in."""


def check_links(folder: Path) -> None:
    """Refuse small files of a model, checkpoint or run that lie elsewhere."""
    if not folder.is_dir():
        return
    root = folder.resolve()
    inside = [folder / name for name in FOLDERS]
    # a folder that is a link itself is judged, not entered
    inner = (path for one in inside if not one.is_symlink() for path in one.glob("*"))
    for path in sorted([*folder.iterdir(), *inner]):
        if not SMALL.fullmatch(path.name) and path not in inside:
            continue
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
