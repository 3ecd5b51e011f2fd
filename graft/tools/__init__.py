"""Tools: things a policy can call in the middle of its text.

A tool is any object with a `name` and `__call__(content) -> str`. What the policy got wrong is
answered with text that begins with "Error: "; only a broken tool raises. What else a tool may have:

    description, parameters   what the model reads; `parameters` is a JSON schema of an object
    call(arguments) -> str    takes the arguments of a JSON call as they are
    blocking                  True: it waits for something, so its env steps on a thread
    concurrency               most calls at a time, over all envs of the process
    fork, reset, close,       a tool with state: one copy per episode, and the state as plain data;
    get_state, set_state      `is_stateful = False` says that this one has none after all

A typed Python function does as well: its signature is the schema (`graft.tools.function`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graft.registry import resolve
from graft.tools.options import check_options

ERROR = "Error: "
"""How every tool begins the answer to a call it could not carry out."""

TOOLS: dict[str, Any] = {
    "calculator": "graft.tools.calculator:Calculator",
    "python": "graft.tools.python:PythonTool",
    "search": "graft.tools.search:SearchTool",
}
"""Name -> the tool's class, or where to import it from."""


def is_error(result: str) -> bool:
    """True if a tool's answer says that the call failed.

    >>> is_error("Error: division by zero"), is_error("170")
    (True, False)
    """
    return result.startswith(ERROR)


def has_state(tool: Any) -> bool:
    """True if a call can change what a later call is answered, so that forks need their own."""
    return hasattr(tool, "fork") and getattr(tool, "is_stateful", True)


def make_tool(what: Any, **arguments: Any) -> Any:
    """One tool: a name of `TOOLS` or "your.module:name", a class, a typed function, a tool itself.

    >>> make_tool("calculator", max_operations=1)("34*5")
    '170'
    """
    if what == "mcp":
        raise ValueError(
            "'mcp' needs to know its servers and stands for all their tools: write "
            '{"mcp": "http://host:8000/mcp"} in a list of tools, or use graft.tools.mcp.McpTools'
        )
    target: Any = resolve(what, TOOLS, "tool") if isinstance(what, str) else what
    if isinstance(target, type):
        check_options(target, arguments, f"tool {what!r}")
        target, arguments = target(**arguments), {}
        if not callable(target) or not hasattr(target, "name"):
            raise ValueError(f"{what!r} is no tool: it needs a name and __call__(content) -> str")
    if not callable(target):
        raise ValueError(
            f"{what!r} is no tool: pass a name, a typed function, or an object with a name and "
            "__call__(content) -> str"
        )
    if not hasattr(target, "name"):
        from graft.tools.function import FunctionTool

        check_options(FunctionTool, arguments, f"tool {what!r}", given=("function",))
        return FunctionTool(target, **{**getattr(target, "__tool__", {}), **arguments})
    if arguments:
        raise ValueError(f"tool {what!r} is built already and takes no arguments, got {arguments}")
    return target


def make_tools(what: Any) -> list[Any]:
    """Tools as a recipe lists them, each a name, {name: arguments} or anything `make_tool` takes.

        ["python", {"search": {"topk": 3}}, "your.module:weather", {"mcp": "http://..."}]

    "mcp" stands for all the tools of the servers in its configuration; see `graft.tools.mcp`.
    """
    if isinstance(what, str):
        return [make_tool(name.strip()) for name in what.split(",") if name.strip()]
    if isinstance(what, Mapping):
        return [tool for name, arguments in what.items() for tool in _named(name, arguments)]
    if callable(what):
        return [make_tool(what)]
    if not isinstance(what, Iterable):
        raise ValueError(f"tools={what!r}: must be a list of tools, or names with commas between")
    return [tool for one in what for tool in make_tools(one)]


def _named(name: str, arguments: Any) -> list[Any]:
    if name == "mcp":
        from graft.tools.mcp import McpTools

        return list(McpTools(arguments))
    if not isinstance(arguments, Mapping | None):
        raise ValueError(
            f"tool {name!r}: arguments must be written {{name: value}}, not {arguments!r}"
        )
    return [make_tool(name, **(arguments or {}))]
