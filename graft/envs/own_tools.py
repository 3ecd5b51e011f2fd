"""Tools that are methods of an environment, marked with @tool."""

from __future__ import annotations

import inspect
from typing import Any

from graft.envs.base import Wrapper
from graft.envs.tool_env import ToolEnv
from graft.registry import check_options
from graft.tools import make_tool


def own_tools(env: Any) -> list[Any]:
    """The methods of an environment that are marked with @tool, in the order they are written.

    They are `blocking` if the environment is, or if they wait: they are async, or have a timeout. On the
    event loop all attempts would wait with them. @tool(blocking=...) overrides it.
    """
    marked: dict[str, None] = {}
    for kind in reversed(type(env).__mro__[:-1]):  # the last is `object`
        marked |= {name: None for name, one in vars(kind).items() if hasattr(one, "__tool__")}
    methods = [getattr(env, name) for name in marked]
    return [
        make_tool(method, **{"blocking": env.blocking or _waits(method), **method.__tool__})
        for method in methods
        if hasattr(method, "__tool__")  # a subclass may override it without the mark
    ]


def _waits(method: Any) -> bool:
    return method.__tool__.get("timeout") is not None or inspect.iscoroutinefunction(method)


def with_own_tools(env: Any) -> Any:
    """`env` in a ToolEnv with its own tools, if it has any; its class's `tool_options` are the options."""
    if isinstance(env, Wrapper) or not (tools := own_tools(env)):
        return env
    options = {"instructions": None, "counters": True, **getattr(env, "tool_options", {})}
    check_options(ToolEnv, options, f"tool_options of {type(env).__name__}", given=("env", "tools"))
    return ToolEnv(env, tools, **options)
