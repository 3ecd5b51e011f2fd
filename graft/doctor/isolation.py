"""Are attempts isolated? Two copies of an environment act, and neither may change the other.

    alone     a fresh environment, the same task                    look -> "a key", take -> "taken"
    first     a copy of a third one does the same                   look -> "a key", take -> "taken"
    second    another copy, after that                              look -> "nothing here"        fail

Attempts at a task are such copies. Where one of them writes into something that the others read (a class
attribute, a global, an object that a tool holds), rewards are wrong and nothing else shows it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import FunctionType, MethodType, ModuleType
from typing import Any

from graft.deadlines import is_user_file
from graft.doctor.tools import arguments_for
from graft.envs.base import Wrapper, inner_envs
from graft.envs.tool_env import ToolEnv
from graft.protocols import Env
from graft.tools.calling import call_tool
from graft.tools.state import is_rebound
from graft.train.monitor.check import FAIL, PASS, WARN, Check
from graft.types import Author, Task
from graft.user_code import UserCodeError, named, short

TURNS = 4
"""Texts that each environment is given."""
CALLS = 2
"""Of each tool."""
MAX_SEEN = 20_000
"""Values of a state that are compared."""

Answers = list[tuple[str, Any]]
"""Actions and their answers."""


def isolation_check(make_env: Callable[[Task], Env], task: Task) -> Check:
    """Act in a fresh environment, in another one, and in two copies of a third."""
    made: list[Env] = []
    posed: list[str] = []

    def fresh() -> Env:
        env = make_env(task)
        made.append(env)
        posed.append(repr(env.reset(task.seed)[0]))
        return env

    def copied(env: Env) -> Env:
        if not env.forkable:
            return fresh()
        made.append(env.fork())
        return made[-1]

    try:
        texts = texts_for(fresh())
        commons = common_state(fresh())
        alone = answers(fresh(), texts)
        changed = difference(commons, common_state(made[-1]))
        again = answers(fresh(), texts)
        base = fresh()
        first, second = copied(base), copied(base)
        before = outline(second)
        given = answers(first, texts)
        leaked = difference(before, outline(second))
        results = {"the first copy": given, "the second copy": answers(second, texts)}
        results["a copy made afterwards"] = answers(copied(base), texts)
    finally:
        for env in made:
            with suppress(Exception):
                env.close()
    remedy = (
        "keep what an attempt changes in `self`, set it in pose() or __init__, and make tools methods of the "
        "environment (@graft.tool); docs/environments.md shows it"
    )
    what = named(getattr(base, "unwrapped", base), "env")
    blame = f"; {changed} is common to all of them and changed" if changed else ""
    if leaked:
        return Check(
            "isolation", FAIL, f"{what}: acting in one copy changed {leaked} of another", remedy
        )
    prompts = [*dict.fromkeys(posed)]
    odd = f"reset poses {prompts[0]:.80}, then {prompts[1]:.80}" if len(prompts) > 1 else ""
    if (odd := odd or unequal(alone, again)) and not changed:
        seen = f"{what}: the same task, seed and actions in two fresh environments: {odd}"
        way_out = (
            "draw from self.rng alone, and keep what an attempt changes in `self`; else no run can be "
            "repeated, and whether attempts are isolated cannot be shown"
        )
        return Check("isolation", WARN, seen, way_out)
    for name, found in {"a second environment": again, **results}.items():
        if odd := unequal(alone, found):
            seen = f"{what}: {name} answers differently after another has acted: {odd}{blame}"
            return Check("isolation", FAIL, seen, remedy)
    count = len(alone)
    seen = f"{count} act{'s' * (count != 1)} in two copies, answered as in a fresh environment"
    if changed:
        seen += f"; but {changed} is common to all of them, and changed"
        return Check("isolation", WARN, seen, "fine if it is a cache; else keep it in `self`")
    return Check("isolation", PASS, seen)


def texts_for(env: Env) -> list[str]:
    """Actions in the right form, as far as the environment describes it."""
    posed: Any = getattr(env, "unwrapped", env)
    with suppress(Exception):
        return [str(posed.sample_random_action()) for _ in range(TURNS)]
    with suppress(Exception):
        taught = posed.demonstrate(random.Random(0))
        return [str(text) for author, text in taught if author is Author.POLICY][:TURNS]
    return ["1", "test", "yes", "2"][:TURNS]


def answers(env: Env, texts: list[str]) -> Answers:
    """What an environment and its tools answer."""
    found: Answers = []
    for layer in (env, *inner_envs(env)):
        if isinstance(layer, ToolEnv):
            for name, tool in layer.tools.items():
                if is_rebound(tool):
                    arguments = arguments_for(tool)
                    found += [
                        (f"tool {name}", _tried(call_tool, tool, arguments)) for _ in range(CALLS)
                    ]
    for text in texts:
        turn = _tried(env.step, text)
        found.append((f"step({text[:40]!r})", turn[:4] if isinstance(turn, tuple) else turn))
        if not isinstance(turn, tuple) or turn[2] or turn[3]:
            break
    return found


def _tried(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except UserCodeError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def unequal(wanted: Answers, found: Answers) -> str:
    """The first answer that differs, described; "" if none does."""
    for (name, one), (_, other) in zip(wanted, found, strict=False):
        if one != other:
            return f"{name} was answered with {short(one)}, then with {short(other)}"
    return "" if len(wanted) == len(found) else f"{len(wanted)} turns, then {len(found)}"


def outline(value: Any) -> dict[str, str]:
    """The values of an object, by path: {"env.board.at": "2", "env.notes[0]": "'hi'"}."""
    found: dict[str, str] = {}
    _walk(value, "", found, set())
    return found


def _walk(value: Any, path: str, found: dict[str, str], seen: set[int]) -> None:
    if len(found) > MAX_SEEN or isinstance(value, type | ModuleType | FunctionType | MethodType):
        return
    if value is None or isinstance(value, str | int | float | bytes):
        found[path] = repr(value)
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    for name, one in _parts(value):
        _walk(one, f"{path}{name}".removeprefix("."), found, seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield ".len", len(value)
        yield from ((f"[{key!r}]", one) for key, one in value.items())
    elif isinstance(value, list | tuple):
        yield ".len", len(value)
        yield from ((f"[{number}]", one) for number, one in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield "", repr(sorted(map(repr, value)))
    elif hasattr(value, "tolist"):
        yield "", repr(value.tolist())
    else:
        skipped = {"made_by", "env_id", "entry_point", *getattr(type(value), "shared", ())}
        skipped -= {"tools"} if isinstance(value, Wrapper) else set()
        attributes: Mapping[str, Any] = getattr(value, "__dict__", {})
        yield from ((f".{name}", one) for name, one in attributes.items() if name not in skipped)


def difference(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """The first path at which two states differ; "" if none does."""
    for path in (*before, *after):
        if before.get(path) != after.get(path):
            return path.removesuffix(".len")
    return ""


def common_state(env: Env) -> dict[str, str]:
    """Class attributes and globals of the user's own environments, which all attempts share."""
    found: dict[str, str] = {}
    for layer in (env, *inner_envs(env)):
        for kind in type(layer).__mro__:
            module = sys.modules.get(kind.__module__)
            if module is None or not is_user_file(getattr(module, "__file__", None) or "<"):
                continue
            holders = {kind.__qualname__: vars(kind), module.__name__: vars(module)}
            for holder, values in holders.items():
                for name, one in values.items():
                    if not name.startswith("__") and _is_state(one):
                        _walk(one, f"{holder}.{name}", found, set())
    return found


def _is_state(value: Any) -> bool:
    """Plain data, or an object of one of the user's own classes."""
    if isinstance(value, list | dict | set | int | float | str):
        return True
    module = sys.modules.get(type(value).__module__)
    return is_user_file(getattr(module, "__file__", None) or "<")
