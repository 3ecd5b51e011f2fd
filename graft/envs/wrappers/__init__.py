"""Wrappers by name: `wrap(env, "python_tool,concat,episode_tracking")`.

The order is inside out: tools first, then what the policy sees of the history, then tracking.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from graft.envs.checked import check_env
from graft.protocols import Env
from graft.registry import check_options, resolve
from graft.user_code import UserObject, naming

WRAPPERS: dict[str, Any] = {
    "tools": "graft.envs.wrappers.tools:tools",
    "python_tool": "graft.envs.wrappers.tools:python_tool",
    "python_tool_no_int_reward": "graft.envs.wrappers.tools:python_tool_no_int_reward",
    "python_tool_no_int_reward_last_line_error": (
        "graft.envs.wrappers.tools:python_tool_no_int_reward_last_line_error"
    ),
    "search_tool": "graft.envs.wrappers.tools:search_tool",
    "search_tool_no_int_reward": "graft.envs.wrappers.tools:search_tool_no_int_reward",
    "concat": "graft.envs.wrappers.history:concat",
    "concat_with_action": "graft.envs.wrappers.history:concat_with_action",
    "concat_chat": "graft.envs.wrappers.history:concat_chat",
    "concat_chat_on_reset": "graft.envs.wrappers.history:concat_chat_on_reset",
    "max_history": "graft.envs.wrappers.history:max_history",
    "episode_tracking": "graft.envs.wrappers.tracking:EpisodeTracking",
}
"""Name -> the function or class that wraps an env: `build(env, **arguments)`."""

Around = Callable[[Any], Any]
"""A function from env to env."""
Wrappers = str | Mapping[str, Any] | Around | Sequence[str | Mapping[str, Any] | Around]
""" "a,b", {name: {argument: value}}, a function from env to env, or a list of these."""


def wrap(env: Env, names: Wrappers, tokenizer: Any = None) -> Any:
    """`env` inside the named wrappers, the first one innermost.

    wrap(env, ["python_tool", {"max_history": {"turns": 4}}, "your.module:Wrapper"])
    """
    for build in get_wrapper_fns(names, tokenizer):
        with naming(build, "wrapper"):
            env = build(env)
        check_env(env, UserObject(build, "wrapper"))
    return env


def get_wrapper_fns(names: Wrappers, tokenizer: Any = None) -> list[Around]:
    """One function from env to env per name; those that take a `tokenizer` are given it."""
    return [_builder(name, arguments, tokenizer) for name, arguments in listed_wrappers(names)]


def _builder(name: str | Around, arguments: Mapping[str, Any], tokenizer: Any) -> Around:
    build = resolve(name, WRAPPERS, "wrapper")
    accepted = list(inspect.signature(build).parameters)
    given = dict(arguments)
    if tokenizer is not None and "tokenizer" in accepted:
        given.setdefault("tokenizer", tokenizer)
    check_options(build, given, f"wrapper {name!r}", given=accepted[:1])
    return partial(build, **given)


def listed_wrappers(names: Wrappers) -> list[tuple[str | Around, Mapping[str, Any]]]:
    """Name and arguments of each: ["a,b", {c: {x: 1}}] -> [("a", {}), ("b", {}), ("c", {x: 1})]."""
    if callable(names):
        return [(names, {})]
    if isinstance(names, str):
        return [(name.strip(), {}) for name in names.split(",") if name.strip()]
    if isinstance(names, Mapping):
        for name, arguments in names.items():
            if not isinstance(arguments, Mapping | None):
                raise ValueError(
                    f"wrapper {name!r}: arguments must be written {{name: value}}, not {arguments!r}"
                )
        return [(name, arguments or {}) for name, arguments in names.items()]
    if not isinstance(names, Sequence):
        raise ValueError(f"wrapper {names!r}: must be a name, or {{name: {{argument: value}}}}")
    return [one for listed in names for one in listed_wrappers(listed)]
