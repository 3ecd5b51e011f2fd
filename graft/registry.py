"""Resolve names in recipes to objects: a table lookup, or the user's own "module:attr"; their arguments."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from graft.deadlines import short_file
from graft.plugins import Table, entries
from graft.spelling import suggestion
from graft.trust import check_name
from graft.user_code import UserCodeError, raised, user_frame


class UnknownName(ValueError):
    """A name that is not in its table; the message lists the known ones."""


def load(path: str, what: str = "object") -> Any:
    """Import "package.module:attr"; modules in the working folder are found too."""
    module_name, _, attribute = path.partition(":")
    if module_name.endswith(".py") or "/" in module_name:
        raise UnknownName(
            f"{what} {path!r} names a file; give the module as Python imports it, "
            f"'{Path(module_name).stem}:{attribute}', from the folder the file lies in"
        )
    if not module_name or not attribute:
        raise UnknownName(f"{what} {path!r} is not of the form 'package.module:name'")
    # installed entry points do not have the working folder on the path
    if module_name not in sys.modules and (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        line = f" (imported at {frame})" if (frame := user_frame(error)) else ""
        raise UnknownName(
            f"{what} {path!r}: cannot import {error.name!r}{line}; is it installed, or in "
            f"{Path.cwd()}?"
        ) from error
    except SyntaxError as error:
        at = f"{short_file(error.filename or module_name)}:{error.lineno}"
        raise UserCodeError(
            f"{what} {path!r} cannot be imported: {type(error).__name__} at {at}: {error.msg}: "
            f"{(error.text or '').strip()}"
        ) from error
    except Exception as error:
        if not user_frame(error):
            raise
        raise raised(f"{what} {path!r} cannot be imported: it", error) from error
    target = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            names = [name for name in dir(target) if not name.startswith("_")]
            hint = suggestion(part, names)
            meant = f"{hint and ';'}{hint}{_shadowed(module)}"
            raise UnknownName(f"{what} {path!r}: {module_name} has no {part!r}{meant}")
        target = getattr(target, part)
    return target


def load_service(name: str) -> Any:
    """A part of a package beside graft that has no table: the sandbox, the search server."""
    services = entries("graft.services")
    if name not in services:
        raise UnknownName(
            f"no installed package brings {name!r} (entry point group graft.services); pip install graft-rl "
            "brings all of graft's own"
        )
    return load(services[name], "service")


def load_named(path: str, what: str) -> Any:
    """`load` for a name that settings give: refused where they are a stranger's."""
    check_name(path, what)
    return load(path, what)


def _shadowed(module: Any) -> str:
    """The explanation where a library has the name of a file of the user."""
    own = Path.cwd().joinpath(*module.__name__.split(".")).with_suffix(".py")
    found = getattr(module, "__file__", None)
    if not own.exists() or (found and Path(found).resolve() == own.resolve()):
        return ""
    return f". Python found {found or 'a built-in module'} under this name, not {own}: rename your file"


def resolve(name: str | Callable[..., Any], table: Mapping[str, Any], what: str) -> Any:
    """The object behind `name`: from `table` (imported now if it is written "module:attr"),
    or the user's own "module:attr". From Python an object may be given instead of a name.

    >>> resolve("grop", {"grpo": 1, "rloo": 2}, "credit")
    Traceback (most recent call last):
    graft.registry.UnknownName: unknown credit 'grop'; did you mean 'grpo'? known: grpo, rloo. ...
    """
    if not isinstance(name, str) and callable(name):
        return name
    if name in table:
        if isinstance(table, Table) and table.is_foreign(name):
            check_name(name, what)
        entry = table[name]
        return load(entry, what) if isinstance(entry, str) else entry
    if ":" in name:
        return load_named(name, what)
    raise UnknownName(
        f"unknown {what} {name!r};{suggestion(name, table)} known: {', '.join(sorted(table))}. "
        f'Your own: "your.module:name"'
    )


def check_options(
    build: Callable[..., Any],
    options: Mapping[str, Any],
    what: str,
    given: Iterable[str] = (),
    meant: Iterable[str] = (),
) -> None:
    """ValueError if `build` lacks one of the options, or requires another; the caller fills `given`.

    `meant` are names outside of `build` that a misspelled option may have meant.

    >>> check_options(Calculator, {"max_operation": 1}, "tool 'calculator'")
    ValueError: tool 'calculator' has no argument 'max_operation'; did you mean 'max_operations'? ...
    """
    accepted = inspect.signature(build).parameters.values()
    named = [one for one in accepted if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    names = [one.name for one in named if one.name not in given]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in accepted)
    known = ", ".join([*names, *(["..."] if takes_any else [])]) or "none"
    for option in options:
        if option in given or (option not in names and not takes_any):
            hint = suggestion(option, [*names, *meant])
            raise ValueError(f"{what} has no argument {option!r};{hint} known: {known}")
    for one in named:
        if one.default is one.empty and one.name in names and one.name not in options:
            raise ValueError(f"{what} needs {one.name}=; its arguments: {known}")
