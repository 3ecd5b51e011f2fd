"""Small files of strangers, read within bounds: what would fill the memory is an error with a name.

read_text(Path("config.json"))      OutOfBounds: 'config.json' has 210,000,017 bytes; at most 33,554,432 ...
parse_yaml("a: &a [x, x]\\nb: ...")   OutOfBounds: its aliases stand for 10,077,697 values ...
"""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 25
"""Of a JSON file or a template: the largest real ones, indices of sharded models, have some 20 MB."""
MAX_YAML = 1 << 20
"""Bytes of a recipe; YAML's reader takes seconds for so many."""
MAX_VALUES = 100_000
"""Of a recipe, with everything that its aliases stand for."""
MAX_DEPTH = 100
"""Of lists and sections inside each other."""

NUMBER = re.compile(r"[-+]?[0-9][0-9a-fA-FxXobB_:.]{400,}")
"""Of more digits than any setting has: Python would take long to read or write it."""


class OutOfBounds(ValueError):
    """A file that is too large, nested too deeply, or no file at all."""


def is_endless(file: Path) -> bool:
    """Whether this is a device or a pipe: to open or read it may never end."""
    try:
        mode = file.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def check_is_file(file: Path) -> None:
    """Refuse a device or a pipe."""
    if is_endless(file):
        raise OutOfBounds(f"'{file}' is not a file but a device or a pipe; it is not read")


def read_bytes(file: Path, most: int = MAX_BYTES) -> bytes:
    """The bytes of an ordinary file, not of a device or a pipe."""
    facts = file.stat()
    if stat.S_ISDIR(facts.st_mode):
        raise IsADirectoryError(21, "Is a directory", str(file))
    check_is_file(file)
    with file.open("rb") as opened:
        found = opened.read(most + 1)
    if len(found) > most:
        raise OutOfBounds(
            f"'{file}' has {max(facts.st_size, len(found)):,} bytes; at most {most:,} are read of such a "
            "file, so it is not what its name says"
        )
    return found


def read_text(file: Path, most: int = MAX_BYTES) -> str:
    return read_bytes(file, most).decode("utf-8")


def parse_json(text: str | bytes, where: str = "") -> Any:
    """`json.loads`, with ValueError also for nesting and numbers that Python refuses."""
    try:
        return json.loads(text)
    except RecursionError:
        raise OutOfBounds(f"{where or 'the JSON'} is nested too deeply") from None


def check_yaml(text: str, where: str) -> None:
    """Raise OutOfBounds for YAML whose aliases or nesting would fill the memory."""
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth, has_alias = 0, False
    for event in yaml.parse(text, Loader=loader):  # without recursion, which crashes the C loader
        opens = isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent)
        depth += opens - isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent)
        has_alias = has_alias or isinstance(event, yaml.AliasEvent)
        if depth > MAX_DEPTH:
            raise OutOfBounds(
                f"{where} is nested more than {MAX_DEPTH} levels deep: it is not read"
            )
        if (
            isinstance(event, yaml.ScalarEvent)
            and event.implicit[0]
            and NUMBER.fullmatch(event.value)
        ):
            raise OutOfBounds(
                f"{where} has a number of {len(event.value):,} characters, {event.value[:20]}...; no "
                "setting has so many: it is not read"
            )
    if not has_alias:
        return
    counts: dict[int, int] = {}

    def count(node: Any) -> int:
        """Values that a node stands for; an alias is the same node again."""
        if id(node) not in counts:
            counts[id(node)] = MAX_VALUES + 1  # inside of itself: without end
            children = node.value if isinstance(node.value, list) else []
            flat = [
                x for child in children for x in (child if isinstance(child, tuple) else (child,))
            ]
            counts[id(node)] = min(1 + sum(map(count, flat)), MAX_VALUES + 1)
        return counts[id(node)]

    root: Any = yaml.compose(text, Loader=loader)
    if root is not None and count(root) > MAX_VALUES:
        raise OutOfBounds(
            f"{where} stands for more than {MAX_VALUES:,} values, with its aliases: it is not read"
        )


def read_yaml(file: Path) -> str:
    """The text of a YAML file that can be loaded without filling the memory."""
    text = read_text(file, MAX_YAML)
    check_yaml(text, f"'{file}'")
    return text


INTERPOLATION = re.compile(r"\$\{([^{}]*)\}")
PLAIN_KEY = re.compile(r"[\w.\[\]]+")


def check_interpolations(values: Any, where: str) -> None:
    """Raise OutOfBounds for `${key}` whose text would grow without end; `values` are unresolved.

    a: lol, b: "${a}${a}", c: "${b}${b}"     c stands for 4 times "lol": counted, not written
    """
    sizes: dict[tuple[int, Any], int] = {}
    most = 10 * MAX_YAML

    def at(inside: tuple[Any, ...], key: Any) -> int:
        """The size of the value `key` of the last of some nested containers."""
        place = id(inside[-1]), key
        if place not in sizes:
            sizes[place] = most + 1  # inside of itself: without end
            sizes[place] = size(inside[-1][key], inside)
        if sizes[place] > most:
            raise OutOfBounds(
                f"{where}: its interpolations have no end, or over {most:,} characters"
            )
        return sizes[place]

    def size(value: Any, inside: tuple[Any, ...]) -> int:
        if isinstance(value, dict | list):
            keys = value if isinstance(value, dict) else range(len(value))
            return 1 + sum(at((*inside, value), key) for key in keys)
        if not isinstance(value, str):
            return 1
        return len(value) + 1 + sum(target(key, inside) for key in INTERPOLATION.findall(value))

    def target(key: str, inside: tuple[Any, ...]) -> int:
        if not PLAIN_KEY.fullmatch(key):
            return 1  # a resolver, such as oc.env
        up = len(key) - len(
            key.lstrip(".")
        )  # ${.key} is beside the value, ${..key} one further out
        found = inside[: max(1, len(inside) - up + 1)] if up else inside[:1]
        *parts, last = re.findall(r"\w+", key) or [""]
        try:
            for part in parts:
                inner = found[-1]
                found = (*found, inner[int(part)] if isinstance(inner, list) else inner[part])
            last = int(last) if isinstance(found[-1], list) else last
            return at(found, last)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            if isinstance(error, OutOfBounds):
                raise
            return 1  # OmegaConf says that there is no such key

    try:
        size(values, ())
    except RecursionError:
        raise OutOfBounds(f"{where}: its interpolations are nested too deeply") from None


def interpolations(values: Any) -> list[str]:
    """Every `${...}` in the texts of some values, without the braces."""
    if isinstance(values, dict):
        return [key for one in values.values() for key in interpolations(one)]
    if isinstance(values, list):
        return [key for one in values for key in interpolations(one)]
    if not isinstance(values, str) or "${" not in values:
        return []
    # nested ones, ${a:${b}}, count as what is around them
    return INTERPOLATION.findall(values) or [values]
