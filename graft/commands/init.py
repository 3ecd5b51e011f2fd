"""`graft init NAME`: a folder to start from, with an environment, a tool, a reward, a recipe and a test."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from graft.commands.options import AsJson

STARTER = Path(__file__).parent.parent / "starter"
"""The files, in an installed graft; in a checkout they lie in examples/, where people look for them."""
CHECKOUT = Path(__file__).parent.parent.parent / "examples" / "starter"
FILES = ("README.md", "drawers.py", "recipe.yaml", "reward.py", "test_drawers.py")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The folder to create, here.")],
    as_json: AsJson = False,
) -> None:
    """Create a folder with an agent to start from. It trains in half a minute; every line is explained."""
    folder = create(name)
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "files": list(FILES)}))
        return
    typer.echo(f"{folder}/ has {', '.join(FILES)}. Next:")
    typer.echo(f"  cd {folder}\n  graft train recipe.yaml    # half a minute on two CPU cores")


def create(name: str) -> Path:
    """Write the files below the working folder; ValueError if the name is bad or taken."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a name for a folder and its runs: give letters, digits, - and _, up to 64 "
            "of them and a letter first, such as my-agent; it is created in the folder you are in"
        )
    folder = Path(name)
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"{name} exists here already: nothing was written; give another name")
    source = STARTER if STARTER.is_dir() else CHECKOUT
    texts = {file: (source / file).read_text(encoding="utf-8") for file in FILES}
    folder.mkdir()
    for file, text in texts.items():
        (folder / file).write_text(re.sub(r"\bNAME\b", name, text), encoding="utf-8")
    return folder
