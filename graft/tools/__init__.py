"""Tools: things a policy can call in the middle of its text.

A tool is any object with a `name` and `__call__(content) -> str`. What the policy got wrong is
answered with text that begins with "Error: "; only a broken tool raises.
"""

from __future__ import annotations

from typing import Any

ERROR = "Error: "
"""How every tool begins the answer to a call it could not carry out."""

TOOLS: dict[str, Any] = {
    "calculator": "graft.tools.calculator:Calculator",
}
"""Name -> the tool's class, or where to import it from."""


def is_error(result: str) -> bool:
    """True if a tool's answer says that the call failed.

    >>> is_error("Error: division by zero"), is_error("170")
    (True, False)
    """
    return result.startswith(ERROR)
