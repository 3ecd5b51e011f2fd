"""Values of a YAML file, each checked, with errors that say where.

fields({"nmae": "swap"}, {"name"}, "sorting.yaml, tool 1")
ActionsError: sorting.yaml, tool 1: unknown key 'nmae'; did you mean 'name'?
"""

from __future__ import annotations

from collections.abc import Collection
from io import StringIO
from pathlib import Path
from typing import Any, cast

from graft.spelling import nearest
from graft.trust.bounds import read_yaml


class ActionsError(ValueError):
    """Actions that cannot work; the message says where, what is wrong and what to do."""


def load_fields(path: Path) -> dict[str, Any]:
    """The keys of a YAML file; a key that is written twice is an error."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        data = OmegaConf.load(StringIO(read_yaml(path)))
        values: Any = OmegaConf.to_container(data, resolve=False)
    except (YAMLError, OmegaConfBaseException, ValueError, OSError) as error:
        raise ActionsError(f"{path} is not an action file: {error}") from error
    except RecursionError as error:  # its message repeats for every level
        raise ActionsError(f"{path} is not an action file: it is nested too deeply") from error
    if not isinstance(values, dict):
        raise ActionsError(f"{path} is not an action file: it holds a list, not keys")
    return cast(dict[str, Any], values)


def fields(value: Any, known: Collection[str], where: str) -> dict[str, Any]:
    """`value` as keys of which none is unknown."""
    if not isinstance(value, dict):
        raise ActionsError(f"{where}: {value!r} where keys are expected; known: {', '.join(known)}")
    values = cast(dict[Any, Any], value)
    for key in values:
        if key not in known:
            hint = nearest(str(key), list(known))
            meant = f"did you mean {hint!r}?" if hint else f"known: {', '.join(known)}"
            raise ActionsError(f"{where}: unknown key {key!r}; {meant}")
    return values


def required(values: dict[str, Any], key: str, where: str) -> Any:
    if key not in values:
        raise ActionsError(f"{where}: the key {key!r} is missing")
    return values[key]


def text(value: Any, where: str) -> str:
    """`value` as a text that is not empty."""
    if not isinstance(value, str):
        raise ActionsError(
            f'{where}: {value!r} is not a text; put it in quotation marks, as in "{value}"'
        )
    if not value:
        raise ActionsError(f"{where}: the text is empty; the model would read nothing of it")
    return value


def several(value: Any, where: str) -> list[Any]:
    """`value` as a list that is not empty."""
    if not isinstance(value, list):
        raise ActionsError(f"{where}: {value!r} is not a list; write [...]")
    if not value:
        raise ActionsError(f"{where}: the list is empty; it needs at least one entry")
    return cast(list[Any], value)
