"""Environment variables that a recipe names: resolved in memory, written as names, secrets masked."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from graft.trust import check_program, stranger
from graft.trust.bounds import PLAIN_KEY, check_interpolations, interpolations
from graft.trust.masking import looks_secret, masked, remember, remember_all


class Reference(NamedTuple):
    """A text of the recipe that names environment variables, and what it stands for in this process."""

    path: tuple[str | int, ...]
    """("task", "args", "token")"""
    text: str
    """As in the recipe: "Bearer ${oc.env:MCP_TOKEN}"."""
    value: str


VARIABLE = re.compile(r"oc\.env:\s*(\w+)")


def escaped(value: Any) -> Any:
    """Texts that name environment variables with every ${ escaped, so that they are not resolved."""
    if isinstance(value, dict):
        return {key: escaped(one) for key, one in value.items()}
    if isinstance(value, list):
        return [escaped(one) for one in value]
    if isinstance(value, str) and VARIABLE.search(value):
        return re.sub(r"(?<!\\)\$\{", r"\\${", value)
    return value


def references_in(
    unresolved: Any, values: Any, path: tuple[str | int, ...] = ()
) -> Iterator[Reference]:
    """Find the places where the same recipe, read in both ways, has different texts."""
    if isinstance(unresolved, dict) and isinstance(values, dict):
        for key in unresolved:
            yield from references_in(unresolved[key], values[key], (*path, key))
    elif isinstance(unresolved, list) and isinstance(values, list):
        for index, pair in enumerate(zip(unresolved, values, strict=True)):
            yield from references_in(*pair, (*path, index))
    elif isinstance(unresolved, str) and isinstance(values, str) and unresolved != values:
        yield Reference(path, unresolved, values)


def remember_secrets(values: Any, references: Sequence[Reference]) -> None:
    """Have secrets masked in all texts: those in clear, and those that references stand for."""
    remember_all(values)
    for path, text, value in references:
        for name in VARIABLE.findall(text):
            secret = os.environ.get(name, "").strip()
            if secret and (looks_secret(name, secret) or masked(value, str(path[-1])) != value):
                remember(secret, f"${{oc.env:{name}}}")


MASKED = re.compile(r"^\*\*\*$|://\*\*\*@|=\*\*\*|(?i:bearer|basic) \*\*\*")


def masked_secret(values: Any, path: str = "") -> str:
    """The complaint about a secret of which a run's config.yaml has only the mask; "": there is none."""
    if isinstance(values, dict | list):
        named = values.items() if isinstance(values, dict) else enumerate(values)
        found = (masked_secret(one, f"{path}.{key}" if path else str(key)) for key, one in named)
        return next(filter(None, found), "")
    if isinstance(values, str) and MASKED.search(values):
        return (
            f"{path}={values!r}: a secret that stood in the recipe in clear, which a run does not store. "
            f"Put it into an environment variable and name that: {path}='${{oc.env:NAME}}'"
        )
    return ""


def check_references(values: Any, where: str, is_resolved: bool) -> None:
    """Refuse interpolations that have no end; in a stranger's file also what reads the environment."""
    check_interpolations(values, where)
    if stranger() is None or not is_resolved:
        return
    for key in interpolations(values):
        if not PLAIN_KEY.fullmatch(key):
            check_program(f"the interpolation ${{{key}}}, which can read environment variables")
