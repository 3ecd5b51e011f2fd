"""State of tools: what each attempt has of its own, and what all attempts share.

A tool with fork() has state, and each fork of an environment its own copy. A tool that refers to parts of
its environment is rebound to those of the fork (`graft.tools.rebind`). Any other tool is shared, and may not
change in a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graft.ours import is_ours
from graft.tools import has_state
from graft.tools.calling import call_tool
from graft.tools.function import FunctionTool
from graft.tools.rebind import Memo, rebound
from graft.user_code import UserCodeError, named


def check_state(tool: Any) -> None:
    """Refuse a tool with fork() that cannot be reset or closed."""
    lacks = [one for one in ("reset", "close") if has_state(tool) and not hasattr(tool, one)]
    if lacks:
        raise UserCodeError(
            f"{named(tool, 'tool')} has fork() and so state of its own, but no "
            f"{' and no '.join(lacks)}; write it, or set is_stateful = False"
        )


def is_rebound(tool: Any) -> bool:
    """Whether a fork searches a tool for parts of its environment; graft's own tools have none."""
    if isinstance(tool, FunctionTool):
        return not tool.shared
    return not is_ours(type(tool)) and getattr(tool, "is_stateful", True)


def forked(tool: Any, memo: Memo) -> Any:
    """The tool of a fork; `memo` has the copies of the environment's parts."""
    twin = tool.fork() if has_state(tool) else tool
    return rebound(twin, memo) if is_rebound(twin) else twin


def call_unchanged(tool: Any, arguments: str | Mapping[str, Any]) -> str:
    """The answer of `call_tool`; an error if a tool that attempts share has changed."""
    declares = hasattr(tool, "is_stateful") or hasattr(tool, "fork")
    if declares or isinstance(tool, FunctionTool) or not is_rebound(tool):
        return call_tool(tool, arguments)
    before = sizes(tool)
    answer = call_tool(tool, arguments)
    changed = [name for name, size in sizes(tool).items() if before.get(name) != size]
    if changed:
        raise UserCodeError(
            f"{named(tool, 'tool')} changed its attribute {changed[0]!r} in a call, and all attempts "
            "share the object. Give it fork(), reset() and close(), or keep the state in the "
            "environment (docs/tools.md); set is_stateful = False if sharing is intended"
        )
    return answer


def sizes(tool: Any) -> dict[str, tuple[int, int]]:
    """A tool's attributes by identity and length: enough to notice most changes."""
    attributes: dict[str, Any] = getattr(tool, "__dict__", {})
    return {
        name: (id(one), len(one) if isinstance(one, list | dict | set) else 0)
        for name, one in attributes.items()
    }
