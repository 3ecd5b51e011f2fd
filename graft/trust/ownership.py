"""Whose settings a file holds: a key of the user signs the runs that the user starts.

    ~/.config/graft/key              32 random bytes, for this user alone ($XDG_CONFIG_HOME is respected)
    runs/quick/config.yaml.sig       HMAC-SHA256 of config.yaml, written when `graft train` starts
    ~/.config/graft/recipes.jsonl    recipes that this user has trained, or said --trust for: {"path": ...}

A run that was moved or renamed keeps its signature; one that was changed or came from elsewhere has none.
Recipes change while one works on them, so they are known by their path.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from graft.config import bundled_recipes
from graft.files import append_row, parse_object, user_folder, write_text
from graft.trust import Source, names_in, reading
from graft.trust.bounds import read_bytes

SIGNATURE = ".sig"
"""Behind the name of the signed file."""
KEY_BYTES = 32


class NoKey(OSError):
    """The user's key cannot be made, or others can read it."""


def config_folder() -> Path:
    return user_folder("XDG_CONFIG_HOME", "~/.config") / "graft"


def _key(make: bool) -> bytes:
    """The user's key; `make`: a new one where there is none."""
    file = config_folder() / "key"
    if make and not file.exists():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = file.with_name(f".key.{secrets.token_hex(4)}")
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as out:
                out.write(secrets.token_bytes(KEY_BYTES))
            with suppress(FileExistsError):  # another process was first: its key is the one
                os.link(aside, file)
        finally:
            aside.unlink(missing_ok=True)
    with file.open("rb") as opened:
        facts = os.fstat(opened.fileno())
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            raise NoKey(
                f"the key {file} is not yours alone: chown it to yourself and chmod 600 it, or remove it "
                "and your runs need --trust"
            )
        found = opened.read(KEY_BYTES + 1)
    if len(found) != KEY_BYTES:
        raise NoKey(f"the key {file} has {len(found)} bytes, not {KEY_BYTES}: remove it")
    return found


def _signature(content: bytes, make: bool) -> str:
    return hmac.new(_key(make), b"graft run\n" + content, hashlib.sha256).hexdigest()


def sign(file: Path) -> None:
    """Sign a file of a run that this user starts; without a place for a key it stays unsigned."""
    target = file.with_name(file.name + SIGNATURE)
    try:
        text = _signature(file.read_bytes(), make=True)
    except OSError:  # a read-only or no home: later looks at the run need --trust
        target.unlink(missing_ok=True)
        return
    write_text(target, text + "\n")


def why_not_own(file: Path) -> str:
    """Why a recipe or a run's config.yaml is a stranger's; "": it is bundled, signed or known."""
    path = file.resolve()
    if any(path == one.resolve() for one in bundled_recipes().values()):
        return ""
    signature = file.with_name(file.name + SIGNATURE)
    if signature.is_file():
        with suppress(OSError, ValueError):
            given = read_bytes(signature, 100).strip()
            if hmac.compare_digest(_signature(read_bytes(file), make=False).encode(), given):
                return ""
    if str(path) in _known_recipes():
        return ""
    if file.name == "config.yaml":
        kind = "is not by your key" if signature.is_file() else "is missing"
        return f"you did not start this run (its signature {signature.name} {kind})"
    return "you have not trained this recipe yet"


def _known_recipes() -> set[Any]:
    try:
        lines = (config_folder() / "recipes.jsonl").read_bytes().splitlines()
    except OSError:
        return set()
    return {row.get("path") for line in lines if (row := parse_object(line))}


def remember(recipe: str | os.PathLike[str]) -> None:
    """The user trains this recipe, or trusts it: later commands do not ask about it."""
    path = Path(recipe)
    with suppress(OSError):  # a read-only or no home: later commands ask again
        if path.is_file() and why_not_own(path):
            config_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
            append_row(config_folder() / "recipes.jsonl", {"path": str(path.resolve())})


@contextmanager
def settings_from(
    file: str | os.PathLike[str] | None, trust: bool = False, typed: Sequence[str] = ()
) -> Iterator[None]:
    """The settings of a recipe or run are in use inside the block; code that they name runs only if the
    file is the user's own, with `trust`, or if the name is in `typed`, the texts of the user's command.

    file   None or "": there are none, or a bundled recipe's
    """
    path = Path(file) if file else None
    is_read = path is not None and path.is_file() and not trust
    why = why_not_own(path) if is_read and path is not None else ""
    if trust and path is not None and path.name != "config.yaml":
        remember(path)
    with reading(Source(str(file), why, names_in(map(str, typed)), is_said=trust)):
        yield
