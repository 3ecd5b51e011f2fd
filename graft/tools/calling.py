"""Calling a tool: with a text or with JSON arguments, and never more at a time than it can bear.

`concurrency` is a number on the tool. Tools of one class and name that state the same number share
its places, whichever env of the process they belong to: 64 envs with a `search` of concurrency 8
make at most 8 requests at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from graft.tools import ERROR
from graft.tools.errors import ToolError
from graft.tools.schema import content_of

MAX_WAIT = 600.0  # seconds for a free place
CUT_NOTE = "\n[... {} characters left out ...]\n"

_places: dict[tuple[type, str, int], threading.Semaphore] = {}
_lock = threading.Lock()


def call_tool(tool: Any, what: str | Mapping[str, Any]) -> str:
    """The answer of `tool` to a content, or to the arguments of a JSON call.

    call_tool(Calculator(), "34*5") -> "170"; call_tool(Calculator(), {"expression": "34*5"}) too.
    """
    if getattr(tool, "concurrency", None) is None:
        answer = _call(tool, what)
    else:
        with place(tool):
            answer = _call(tool, what)
    if not isinstance(answer, str):
        raise ToolError(
            f"tool {tool.name!r} answered with {type(answer).__name__}, not with a text"
        )
    return answer


def _call(tool: Any, what: str | Mapping[str, Any]) -> str:
    if isinstance(what, str):
        return tool(what)
    if hasattr(tool, "call"):
        return tool.call(what)
    content, why = content_of(tool, what)
    return f"{ERROR}{why}" if why else tool(content)


@contextmanager
def place(tool: Any, max_wait: float = MAX_WAIT) -> Iterator[None]:
    """Hold one of the tool's `concurrency` places."""
    limit: int = tool.concurrency
    if limit < 1:
        raise ValueError(f"tool {tool.name!r}: concurrency={limit} must be 1 or more, or None")
    with _lock:
        key = (type(tool), tool.name, limit)
        places = _places.setdefault(key, threading.Semaphore(limit))
    if not places.acquire(timeout=max_wait):
        raise ToolError(
            f"waited {max_wait:g} s for one of the {limit} places of tool {tool.name!r}; "
            "its calls hang, or concurrency is too low"
        )
    try:
        yield
    finally:
        places.release()


def shorten(text: str, limit: int | None) -> str:
    """At most `limit` characters of `text`, its head and its tail, and a note of what is missing.

    >>> shorten("0123456789", 4)
    '01\\n[... 6 characters left out ...]\\n89'
    """
    if limit is None or len(text) <= limit:
        return text
    tail = limit // 2
    head = limit - tail
    return text[:head] + CUT_NOTE.format(len(text) - limit) + text[len(text) - tail :]
