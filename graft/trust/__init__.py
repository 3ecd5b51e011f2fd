"""Whether code that settings name may run: "module:attr", programs, pickles.

While the settings of a stranger are in use, the names in them are refused where they would be imported:

    with reading(Source("downloads/run/config.yaml", "its signature is not by your key")):
        resolve("evil:Env", ENVS, "env")      NotTrusted: ... names the env 'evil:Env' ... --trust

Outside of such a block every name is the user's own. `graft.trust.ownership` decides whose a file is;
`bounds` reads small files of strangers, `restricted_pickle` messages between processes, and `masking`
removes secrets from texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

HOW = "If you trust its author, add --trust (from Python: trust=True)"


class NotTrusted(ValueError):
    """Code of a file that this user did not start; the message names the code, the file and --trust."""


@dataclass(frozen=True, slots=True)
class Source:
    """The file whose settings are in use."""

    file: str
    why: str = ""
    """Why its author is a stranger; "": the user's own, or the user said --trust."""
    typed: frozenset[str] = frozenset()
    """Names in the user's command: these are the user's own."""


SERVER = re.compile(r"\w+://[^\s/?#,'\"\]}]+")
NAME = re.compile(r"[\w.]+:[\w.]+")

# one for the process, not per thread: environments are made on threads of their own
_sources: list[Source] = []


@contextmanager
def reading(source: Source) -> Iterator[None]:
    """The settings of `source` are in use inside the block."""
    _sources.append(source)
    try:
        yield
    finally:
        _sources.remove(source)


def names_in(texts: Iterable[str]) -> frozenset[str]:
    """What the user typed: the texts, values behind "=", and names in them.

    >>> sorted(names_in(["task.env=[my_env:Env]", "my.jinja"]))
    ['[my_env:Env]', 'my.jinja', 'my_env:Env', 'task.env=[my_env:Env]']
    """
    given = [part for text in texts for part in (text, text.partition("=")[2]) if part]
    return frozenset([*given, *(name for text in given for name in NAME.findall(text))])


def stranger() -> Source | None:
    """The source in use whose author is a stranger; None: there is none."""
    return next((source for source in reversed(_sources) if source.why), None)


def check_name(name: str, what: str) -> None:
    """Raise NotTrusted if a stranger's settings name this code, which would be imported now."""
    source = stranger()
    if source is None or name in source.typed:
        return
    raise NotTrusted(
        f"{source.file} names the {what} {name!r}, which is code that would be imported, and "
        f"{source.why}. {HOW}"
    )


def check_program(what: str, name: str = "") -> None:
    """Raise NotTrusted if a stranger's settings would use this: 'the program "bash -c ..."'.

    name   the user may have typed it, and then it is the user's own
    """
    if (source := stranger()) is not None and name not in source.typed:
        raise NotTrusted(f"{source.file} asks for {what}, and {source.why}. {HOW}")


def check_address(url: str) -> None:
    """Raise NotTrusted if a stranger's settings are in use and the user did not type this server."""
    source = stranger()
    if source is None:
        return
    parts = urlsplit(url)
    server = f"{parts.scheme}://{parts.netloc}"
    if not any(server in SERVER.findall(text) for text in source.typed):
        raise NotTrusted(f"{source.file} would connect to {server}, and {source.why}. {HOW}")


def check_written(folder: Path) -> None:
    """Raise NotTrusted if what will be written to this folder of a stranger's run would end elsewhere."""
    source = stranger()
    if source is None:
        return
    for path in chain([folder], folder.rglob("*")):
        if path.is_symlink() or (path.exists() and not path.is_dir() and not path.is_file()):
            raise NotTrusted(
                f"'{path}' is a link or a device, where results would be written, and {source.why}. "
                f"Remove it. {HOW}"
            )
