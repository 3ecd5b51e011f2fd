"""Rebind the tools of a copied environment: references to the original become references to the copy.

    env = Room()                            tools [env.look]
    twin = env.fork()                       tools [twin.look], never a `look` of the original

A tool may be one of its methods, a method of an object inside it, a partial, lambda or closure over
either, or an object with a reference to it: all are rebuilt for the copy. A function also gets its own copy
of the plain containers that it closes over; other objects (an index, a connection) are shared by all
copies. `memo` is the memo of `copy.deepcopy`: id(original) -> copy.
"""

from __future__ import annotations

import copy
import dis
import gc
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import CellType, CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

from graft.user_code import UserCodeError, named

Memo = dict[int, Any]

CONTAINERS = (list, dict, set, bytearray, deque)
MAX_COPIED = 10_000
"""Entries of a container in a closure, above which the user must declare it as shared or move it."""
MAX_DEPTH, MAX_WIDTH = 6, 200
"""How deep and wide a tool is searched for references to its environment."""
MAX_SEEN = 5_000


def rebound(value: Any, memo: Memo) -> Any:
    """`value` for the copy; the same object if it has no reference to the original."""
    return _Rebinding(memo).of(value)


class _Rebinding:
    """One search through a tool. Objects without a reference to the original are visited once."""

    def __init__(self, memo: Memo) -> None:
        self.memo = memo
        self.unchanged: set[int] = set()
        self.kept: list[Any] = []  # kept alive, so that their ids stay unique

    def of(self, value: Any, depth: int = 0) -> Any:
        if id(value) in self.memo:
            return self.memo[id(value)]
        if isinstance(value, str | int | float | type | ModuleType | None):
            return value
        if id(value) in self.unchanged or depth > MAX_DEPTH or len(self.unchanged) > MAX_SEEN:
            return value
        self.unchanged.add(id(value))
        self.kept.append(value)
        made = self._made(value, depth + 1)
        if made is not value:
            self.unchanged.discard(id(value))
            self.memo[id(value)] = made
            # keeps it alive, as deepcopy does
            self.memo.setdefault(id(self.memo), []).append(value)
        return made

    def _made(self, value: Any, depth: int) -> Any:
        if isinstance(value, types.MethodType):
            owner, function = self.of(value.__self__, depth), self.of(value.__func__, depth)
            is_same = owner is value.__self__ and function is value.__func__
            return value if is_same else types.MethodType(function, owner)
        if isinstance(value, types.BuiltinMethodType):  # as in board.append
            owner = self.of(value.__self__, depth)
            return value if owner is value.__self__ else getattr(owner, value.__name__)
        if isinstance(value, partial):
            return self._partial(value, depth)
        if isinstance(value, FunctionType):
            return self._function(value, depth)
        if isinstance(value, list | tuple | set | dict):
            return self._container(value, depth)
        return self._object(value, depth)

    def _partial(self, value: partial[Any], depth: int) -> Any:
        function, args = self.of(value.func, depth), self.of(value.args, depth)
        keywords = self.of(value.keywords, depth)
        if function is value.func and args is value.args and keywords is value.keywords:
            return value
        made = partial(function, *args, **keywords)
        vars(made).update(vars(value))
        return made

    def _function(self, value: FunctionType, depth: int) -> Any:
        cells = tuple(self._cell(cell, name, value, depth) for cell, name in _free(value))
        attributes = self.of(vars(value), depth)  # such as __wrapped__ of a decorator
        is_same = all(new is old for new, (old, _) in zip(cells, _free(value), strict=True))
        if is_same and attributes is vars(value):
            return value
        code, defaults = value.__code__, value.__defaults__
        made = FunctionType(code, value.__globals__, value.__name__, defaults, cells)
        vars(made).update(attributes)
        made.__doc__, made.__qualname__ = value.__doc__, value.__qualname__
        made.__kwdefaults__, made.__module__ = value.__kwdefaults__, value.__module__
        made.__annotations__ = value.__annotations__
        return made

    def _cell(self, cell: CellType, name: str, function: FunctionType, depth: int) -> CellType:
        if id(cell) in self.memo:  # shared with another tool
            return self.memo[id(cell)]
        try:
            held = cell.cell_contents
        except ValueError:  # empty: the variable is assigned later
            return cell
        new = self.of(held, depth)
        if new is held and isinstance(held, CONTAINERS):
            new = copy.deepcopy(held, self.memo)
        if new is held and not is_written(function.__code__, name):
            return cell
        self.memo[id(cell)] = made = CellType(new)
        return made

    def _container(self, value: Any, depth: int) -> Any:
        if len(value) > MAX_WIDTH:
            return value
        if isinstance(value, dict):
            found = {key: self.of(one, depth) for key, one in value.items()}
            return value if all(found[key] is value[key] for key in value) else found
        listed = list(value)
        found = [self.of(one, depth) for one in listed]
        if all(new is old for new, old in zip(found, listed, strict=True)):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*found)
        return type(value)(found)

    def _object(self, value: Any, depth: int) -> Any:
        attributes = _attributes(value)
        if len(attributes) > MAX_WIDTH:
            return value
        new = {name: self.of(one, depth) for name, one in attributes.items()}
        changed = {name: one for name, one in new.items() if one is not attributes[name]}
        if not changed:
            return value
        made = copy.copy(value)
        for name, one in changed.items():
            object.__setattr__(made, name, one)
        return made


def _free(function: FunctionType) -> list[tuple[CellType, str]]:
    return list(zip(function.__closure__ or (), function.__code__.co_freevars, strict=True))


def is_written(code: CodeType, name: str) -> bool:
    """Whether a function assigns to a variable of the function around it (`nonlocal`)."""
    steps = dis.get_instructions(code)
    return any(step.opname == "STORE_DEREF" and step.argval == name for step in steps)


def _attributes(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and not name.startswith("__"):
                found[name] = getattr(value, name)
    return found


def counterparts(original: Any, twin: Any, memo: Memo, depth: int = 0) -> None:
    """Fill `memo` from an object and its copy, which the user's own code made."""
    if original is twin or id(original) in memo or type(original) is not type(twin):
        return
    if depth > MAX_DEPTH or isinstance(original, str | int | float | None):
        return
    memo[id(original)] = twin
    if isinstance(original, list | tuple):
        pairs = list(zip(original, twin, strict=False))
    else:
        is_dict = isinstance(original, dict)
        inner, copied = (one if is_dict else _attributes(one) for one in (original, twin))
        pairs = [(one, copied[name]) for name, one in inner.items() if name in copied]
    for one, other in pairs:
        counterparts(one, other, memo, depth + 1)


def check_tools(tools: Mapping[str, Any], layers: Iterable[Any]) -> None:
    """Refuse tools that a copy of the environment would share with the original.

    `layers` are the environment and the wrappers around it.
    """
    originals = {id(layer): layer for layer in layers}
    # a trial with stand-ins for the copies: a tool that still reaches a layer cannot be rebound
    memo: Memo = {number: _Copy() for number in originals}
    for name, tool in tools.items():
        for function in functions_of(tool):
            _check_size(name, function)
        made = rebound(tool, memo)
        if (found := _reaches(made, originals)) is not None:
            layer, through = found
            raise UserCodeError(
                f"{named(tool, 'tool')} reaches its environment {type(layer).__name__} through "
                f"{through}, so every attempt, which has its own copy of the environment, would act on the "
                f"original. Make the tool a method of the environment: @graft.tool def {name}(self, ...)"
            )


class _Copy:
    """A stand-in for the copy of a layer."""


_SKIPPED = (str, int, float, ModuleType, CodeType, FrameType, TracebackType, BaseException, _Copy)
"""Types that are not searched; a traceback refers to every variable of its frames."""


def _check_size(name: str, function: FunctionType) -> None:
    for cell, variable in _free(function):
        try:
            held = cell.cell_contents
        except ValueError:
            continue
        if isinstance(held, CONTAINERS) and len(held) > MAX_COPIED:
            raise UserCodeError(
                f"{named(function, f'tool {name!r}:')} closes over {variable!r}, a "
                f"{type(held).__name__} of {len(held):,} entries. If calls change it, each attempt needs "
                "its own: keep it in the environment, as self.NAME. If all attempts share it as "
                "constant data, use graft.tool(shared=True)"
            )


def functions_of(tool: Any) -> Iterator[FunctionType]:
    """The plain function behind a tool, if there is one."""
    function = getattr(tool, "function", tool)
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if isinstance(function, FunctionType):
        yield function


def _reaches(tool: Any, originals: Mapping[int, Any]) -> tuple[Any, str] | None:
    """A layer that a tool refers to, and through what; None if it refers to none."""
    for function in functions_of(tool):
        for name in function.__code__.co_names:
            if id(value := function.__globals__.get(name)) in originals:
                return value, f"the global {name}"
    seen: set[int] = set()
    waiting = deque([(tool, type(tool).__name__)])
    while waiting and len(seen) < MAX_SEEN:
        value, through = waiting.popleft()
        if id(value) in originals:
            return value, through
        if id(value) in seen or isinstance(value, _SKIPPED):
            continue
        seen.add(id(value))
        if isinstance(value, type) and "<locals>" not in value.__qualname__:
            continue  # classes refer to modules, and those to everything
        if isinstance(value, FunctionType):
            held = [cell for cell, _ in _free(value)]
        else:
            held = gc.get_referents(value)
        through = getattr(value, "__qualname__", "") or through
        waiting.extend((one, through) for one in held if not isinstance(one, ModuleType))
    return None
