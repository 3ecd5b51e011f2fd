"""Whose settings a file holds: a key of the user signs the runs that the user starts.

    ~/.config/graft/key              32 random bytes, for this user alone ($XDG_CONFIG_HOME is respected)
    runs/quick/config.yaml.sig       HMAC-SHA256 of config.yaml, written when `graft train` starts
    ~/.config/graft/recipes.jsonl    recipes that this user has trained, or said --trust for:
                                     {"path": ..., "mac": HMAC-SHA256 of the path}

A run that was moved or renamed keeps its signature; one that was changed or came from elsewhere has none.
Recipes change while one works on them, so they are known by their path. `graft.trust.belongings` says
which ones are the user's without being known.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from graft.config import bundled_recipes
from graft.files import parse_object, user_folder, write_text
from graft.trust import Source, names_in, reading
from graft.trust.belongings import SETTINGS, is_of_run, why_not_mine
from graft.trust.bounds import read_bytes

SIGNATURE = ".sig"
"""Behind the name of the signed file."""
KEY_BYTES = 32
RECIPES = "recipes.jsonl"


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


def _mac(kind: str, content: bytes, make: bool) -> str:
    return hmac.new(_key(make), f"graft {kind}\n".encode() + content, hashlib.sha256).hexdigest()


def sign(file: Path) -> None:
    """Sign a file of a run that this user starts; without a place for a key it stays unsigned."""
    target = file.with_name(file.name + SIGNATURE)
    try:
        text = _mac("run", file.read_bytes(), make=True)
    except OSError:  # a read-only or no home: later looks at the run need --trust
        target.unlink(missing_ok=True)
        return
    write_text(target, text + "\n")


def why_not_own(file: Path) -> str:
    """Why a recipe or a run's config.yaml is a stranger's; "": it is the user's, or comes with graft.

    A config.yaml is a run's: only the signature makes it the user's, never a record of a recipe.
    """
    path = file.resolve()
    if any(path == one.resolve() for one in bundled_recipes().values()):
        return ""
    if path.name == SETTINGS:
        return _why_unsigned(path)
    if str(path) in _known_recipes():
        return ""
    return why_not_mine(path)


def _why_unsigned(file: Path) -> str:
    signature = file.with_name(file.name + SIGNATURE)
    if not signature.is_file():
        return f"you did not start this run (its signature {signature.name} is missing)"
    with suppress(OSError, ValueError):
        given = read_bytes(signature, 100).strip()
        if hmac.compare_digest(_mac("run", read_bytes(file), make=False).encode(), given):
            return ""
    return f"you did not start this run (its signature {signature.name} is not by your key)"


def _known_recipes() -> set[str]:
    """Paths of the recipes that this user trained or trusted; a line that graft did not write is none."""
    file = config_folder() / RECIPES
    try:
        lines = read_bytes(file).split(b"\n")
    except (OSError, ValueError):
        return set()
    rows = [_recipe_in(line) for line in lines if line]
    if None in rows:
        at = rows.index(None) + 1
        warnings.warn(
            f"{file}:{at} is no record of a recipe that graft wrote for you, and is ignored; remove it",
            stacklevel=2,
        )
    return {path for path in rows if path}


def _recipe_in(line: bytes) -> str | None:
    """The path in a line {"path": ..., "mac": ...} by this user's key; None: anything else."""
    row = parse_object(line)
    if row is None or row.keys() != {"path", "mac"}:
        return None
    path, mac = row["path"], row["mac"]
    if not (isinstance(path, str) and isinstance(mac, str) and mac.isascii()):
        return None
    with suppress(OSError, UnicodeEncodeError):
        if hmac.compare_digest(_mac("recipe", path.encode(), make=False), mac):
            return path
    return None


def remember(recipe: str | os.PathLike[str]) -> None:
    """The user trains this recipe, or trusts it: later commands do not ask about it."""
    path = Path(recipe)
    with suppress(OSError, UnicodeEncodeError):  # a read-only or no home: later commands ask again
        if not path.is_file() or path.resolve().name == SETTINGS or not why_not_own(path):
            return
        place = str(path.resolve())
        row = {"path": place, "mac": _mac("recipe", place.encode(), make=True)}
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        descriptor = os.open(config_folder() / RECIPES, flags, 0o600)
        with os.fdopen(descriptor, "rb+", buffering=0) as file:
            os.fchmod(file.fileno(), 0o600)
            end = file.seek(0, os.SEEK_END)
            is_torn = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"
            file.write(b"\n" * is_torn + json.dumps(row).encode() + b"\n")


@contextmanager
def settings_from(
    file: str | os.PathLike[str] | None,
    trust: bool = False,
    typed: Sequence[str] = (),
    *,
    is_trained: bool = False,
) -> Iterator[None]:
    """The settings of a recipe or run are in use inside the block; what they would do is done only if the
    file is the user's own, with `trust`, or if it is in `typed`, the texts of the user's command.

    file         None or "": there are none, or a bundled recipe's
    is_trained   the user trains this recipe, which is to run its code; a run of a stranger is still one
    """
    path = Path(file) if file else None
    why = ""
    if path is not None and path.is_file():
        if not trust and (is_of_run(path) or not is_trained):
            why = why_not_own(path)
        if trust or (is_trained and not why):
            remember(path)
    with reading(Source(str(file), why, names_in(map(str, typed)))):
        yield
