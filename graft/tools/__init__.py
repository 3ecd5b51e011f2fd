"""Tools that a policy can call in its text.

A tool is any object with a `name` and `__call__(content) -> str`. A bad call is answered with a text
that begins with "Error: "; only a broken tool raises. Optional attributes:

    description, parameters   shown to the model; `parameters` is the JSON schema of an object
    call(arguments) -> str    takes the arguments of a JSON call
    blocking                  True: it waits for something, so its env steps on a thread
    concurrency               the largest number of calls at a time, over all envs of the process
    fork, reset, close,       a tool with state: one copy per episode, and the state as plain data;
    get_state, set_state      `is_stateful = False` marks an instance without state

A typed Python function is a tool too: its signature is the schema (`graft.tools.function`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graft.plugins import Table
from graft.registry import check_options, resolve
from graft.tools.errors import ERROR, is_error

__all__ = ["ERROR", "TOOLS", "has_state", "is_error", "make_tool", "make_tools"]

TOOLS = Table("graft.tools", {"calculator": "graft.tools.calculator:Calculator"})
"""Name -> "module:attribute" of the tool's class; most come from the packages beside graft."""


def has_state(tool: Any) -> bool:
    """True if a call can change the answer to a later call, so that forks need their own copy."""
    return hasattr(tool, "fork") and getattr(tool, "is_stateful", True)


def make_tool(what: Any, **arguments: Any) -> Any:
    """One tool: a name of `TOOLS` or "your.module:name", a class, a typed function, a tool itself.

    >>> make_tool("calculator", max_operations=1)("34*5")
    '170'
    """
    if what == "mcp":
        raise ValueError(
            "'mcp' stands for all the tools of its servers and needs their addresses: write "
            '{"mcp": "http://host:8000/mcp"} in a list of tools, or use graft_search.mcp.McpTools'
        )
    target: Any = resolve(what, TOOLS, "tool") if isinstance(what, str) else what
    is_class = isinstance(target, type)
    if is_class:
        check_options(target, arguments, f"tool {what!r}")
        target, arguments = target(**arguments), {}
    if not callable(target) or (is_class and not hasattr(target, "name")):
        raise ValueError(
            f"{what!r} is not a tool: pass a name, a typed function, or an object with a name and "
            "__call__(content) -> str"
        )
    if not hasattr(target, "name"):
        from graft.tools.function import FunctionTool

        check_options(FunctionTool, arguments, f"tool {what!r}", given=("function",))
        return FunctionTool(target, **{**getattr(target, "__tool__", {}), **arguments})
    if arguments:
        raise ValueError(f"tool {what!r} is an instance and takes no arguments, got {arguments}")
    return target


def make_tools(what: Any) -> list[Any]:
    """Tools from a recipe's list, each a name, {name: arguments} or any argument of `make_tool`.

        ["python", {"search": {"topk": 3}}, "your.module:weather", {"mcp": "http://..."}]

    "mcp" stands for all the tools of the configured servers; see `graft_search.mcp`.
    """
    if isinstance(what, str):
        return [make_tool(name.strip()) for name in what.split(",") if name.strip()]
    if isinstance(what, Mapping):
        return [tool for name, arguments in what.items() for tool in _named(name, arguments)]
    if not callable(what) and isinstance(what, Iterable):
        return [tool for one in what for tool in make_tools(one)]
    return [make_tool(what)]


def _named(name: str, arguments: Any) -> list[Any]:
    if name == "mcp":
        return list(resolve("mcp", TOOLS, "tool")(arguments))
    if not isinstance(arguments, Mapping | None):
        raise ValueError(f"tool {name!r}: arguments must be {{name: value}}, not {arguments!r}")
    return [make_tool(name, **(arguments or {}))]
