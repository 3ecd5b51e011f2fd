"""What is wrong with the values of a recipe, in words: pydantic's problems by key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import ValidationError

from graft.recipe.peer_keys import FIRST_KEYS, has_answer, leaves_of, meant
from graft.recipe.section import Section

MAX_EXPLAINED = 40
"""Unknown keys that are explained; a whole recipe of verl has hundreds."""


def explain_problems(error: ValidationError, config: type[Section]) -> str:
    """What is wrong with the values of a `config`: one line, or a line for each problem below the first.

    A key that takes values of several types has a problem with each of them; they become one.
    """
    problems: dict[str, list[Any]] = {}
    for problem in error.errors():
        problems.setdefault(_key_of(problem["loc"], config), []).append(problem)
    known = keys_of(config)
    unknown: list[str] = []
    lines: list[str] = []
    for key, found in problems.items():
        if found[0]["type"] == "extra_forbidden":
            unknown += leaves_of(key, found[0]["input"])
        else:
            lines.append(_explain(key, *found))
    count = len(lines) + len(unknown)
    lines += _explain_unknown(unknown, known)
    return lines[0] if count == 1 else "\n  ".join([f"{count} problems", *lines])


def _explain_unknown(names: Sequence[str], known: Mapping[str, str]) -> Iterator[str]:
    """A line for each unknown key, those with an answer first."""
    answers = {name: meant(name, known) for name in names}
    ordered = sorted(names, key=lambda name: not has_answer(answers[name]))
    for name in ordered[:MAX_EXPLAINED]:
        yield f"unknown key {name!r}; {answers[name]}"
    if (more := len(ordered) - MAX_EXPLAINED) > 0:
        yield f"and {more} more unknown keys, such as {ordered[MAX_EXPLAINED]!r}"
    if len(names) > 3:
        yield "`graft translate FILE` writes a recipe from the settings of TRL and verl"


def keys_of(config: type[Section]) -> dict[str, str]:
    """Every key of its sections, and the key's line of documentation."""
    documented: dict[str, str] = {}
    for section, info in config.model_fields.items():
        for name, field in type(info.default).model_fields.items():
            documented[f"{section}.{name}"] = " ".join((field.description or "").split())
    return documented


def _key_of(loc: Sequence[int | str], config: type[Section]) -> str:
    """The key of a problem. If sft.skip_bad is of type bool or int: sft.skip_bad.bool -> sft.skip_bad."""
    if len(loc) > 2 and loc[0] in config.model_fields:
        section = type(config.model_fields[str(loc[0])].default)
        field = section.model_fields.get(str(loc[1]))
        types = {*get_args(field.annotation)} - {NoneType} if field else set()
        if field and get_origin(field.annotation) in (Union, UnionType) and len(types) > 1:
            loc = (*loc[:2], *loc[3:])
    return ".".join(map(str, loc))


def _explain(key: str, problem: Any, *others: Any) -> str:
    """What is wrong with one value; `problem` and others of the same key are pydantic's."""
    if problem["type"] == "model_type" and key in FIRST_KEYS:
        return f"{key}={problem['input']!r}: {key} is a section; did you mean {FIRST_KEYS[key]!r}?"
    found = [str(one["msg"]).removeprefix("Value error, ") for one in (problem, *others)]
    if not key:
        return found[0]
    message = ", or ".join(dict.fromkeys(one[0].lower() + one[1:] for one in found))
    if problem["type"] == "string_type" and isinstance(problem["input"], int | float):
        message += f"; YAML reads this as a number: quote it, as in {key}='\"01\"'"
    if problem["type"] in ("list_type", "tuple_type") and not isinstance(problem["input"], dict):
        more = ", ..." if problem["type"] == "tuple_type" else ""
        message += f"; write {key}=[{problem['input']}{more}]"
    if problem["type"] in ("dict_type", "model_type"):
        message += f"; write {key}.NAME=VALUE for one of its entries"
    return f"{key}={problem['input']!r}: {message}"
