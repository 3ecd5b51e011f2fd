"""Check a recipe's arguments against the parameters of the function or class that gets them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from graft.registry import nearest


def check_options(
    build: Callable[..., Any],
    options: Mapping[str, Any],
    what: str,
    given: Iterable[str] = (),
) -> None:
    """ValueError if `build` lacks one of the options, or requires another; the caller fills `given`.

    >>> check_options(Calculator, {"max_operation": 1}, "tool 'calculator'")
    ValueError: tool 'calculator' has no argument 'max_operation'; did you mean 'max_operations'? ...
    """
    accepted = inspect.signature(build).parameters.values()
    named = [one for one in accepted if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    names = [one.name for one in named if one.name not in given]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in accepted)
    known = ", ".join([*names, *(["..."] if takes_any else [])]) or "none"
    for option in options:
        if option not in names and not takes_any:
            hint = nearest(option, names)
            suggestion = f" did you mean {hint!r}?" if hint else ""
            raise ValueError(f"{what} has no argument {option!r};{suggestion} known: {known}")
    for one in named:
        if one.default is one.empty and one.name in names and one.name not in options:
            raise ValueError(f"{what} needs {one.name}=; its arguments: {known}")
