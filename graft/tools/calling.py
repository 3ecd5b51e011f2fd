"""Call a tool with a text or with JSON arguments, within its limit of concurrent calls.

Tools with the same class, name and `concurrency` share their slots over all envs of the process. A thread
cannot be killed: a caller that stops waiting marks it as abandoned (`graft.rollout.user_calls`), the call
continues, and a tool with 64 such calls is not called again until some of them have returned.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from graft.tools.errors import ERROR, ToolError
from graft.tools.schema import content_of
from graft.trust.masking import mask_values
from graft.user_code import UserCodeError, UserObject, refusal, user_frame

MAX_WAIT = 600.0  # seconds for a free slot
MAX_GIVEN_UP = 64
"""Abandoned calls of one tool that still run, above which the tool is not called."""
CUT_NOTE = "\n[... {} characters left out ...]\n"

_slots: dict[tuple[type, str, int], threading.Semaphore] = {}
_running: dict[tuple[type, str], list[threading.Thread]] = {}
_lock = threading.Lock()


def call_tool(tool: Any, what: str | Mapping[str, Any]) -> str:
    """The answer of `tool` to a content, or to the arguments of a JSON call.

    call_tool(Calculator(), "34*5") -> "170"; call_tool(Calculator(), {"expression": "34*5"}) too.
    Any exception of the tool becomes a ToolError: a broken tool ends an attempt, not the program.
    """
    limited = nullcontext() if getattr(tool, "concurrency", None) is None else slot(tool)
    with counted(tool), limited:
        answer = _call(tool, what)
    if not isinstance(answer, str):
        wanted = "a text; a typed function may return anything JSON"
        raise refusal(UserObject(tool, "tool"), answer, wanted)
    return mask_values(answer)  # a server may repeat its key, which no policy is to read


def _call(tool: Any, what: str | Mapping[str, Any]) -> str:
    try:
        if isinstance(what, str):
            return tool(what)
        if hasattr(tool, "call"):
            return tool.call(what)
        content, why = content_of(tool, what)
        return f"{ERROR}{why}" if why else tool(content)
    except (ToolError, UserCodeError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too: a library that calls exit() is a broken tool
        at = f" (at {frame})" if (frame := user_frame(error)) else ""
        why = f"{type(error).__name__}: {error}{at}"
        raise ToolError(f"tool {tool.name!r} failed: {why}") from error


@contextmanager
def counted(tool: Any) -> Iterator[None]:
    """Count a running call; ToolError if too many calls of the tool were abandoned."""
    with _lock:
        calls = _running.setdefault((type(tool), tool.name), [])
        if len(calls) >= MAX_GIVEN_UP and sum(map(is_given_up, calls)) >= MAX_GIVEN_UP:
            raise ToolError(
                f"{MAX_GIVEN_UP} calls of tool {tool.name!r} were abandoned at their deadline and still run; "
                "the tool is not called until some return. Give the tool its own time limit"
            )
        calls.append(threading.current_thread())
    try:
        yield
    finally:
        with _lock:
            calls.remove(threading.current_thread())


def tool_on(thread: threading.Thread) -> str:
    """The name of the tool that runs on a thread; "": none does."""
    with _lock:
        return next((name for (_, name), calls in _running.items() if thread in calls), "")


def is_given_up(thread: threading.Thread) -> bool:
    """True if the caller of this thread has stopped waiting for it."""
    return getattr(thread, "is_given_up", False)


@contextmanager
def slot(tool: Any) -> Iterator[None]:
    """Hold one of the tool's `concurrency` slots."""
    limit: int = tool.concurrency
    if limit < 1:
        raise ValueError(f"tool {tool.name!r}: concurrency={limit} must be 1 or more, or None")
    with _lock:
        key = (type(tool), tool.name, limit)
        slots = _slots.setdefault(key, threading.Semaphore(limit))
    if not slots.acquire(timeout=MAX_WAIT):
        raise ToolError(
            f"waited {MAX_WAIT:g} s for one of the {limit} slots of tool {tool.name!r}; "
            "its calls hang, or concurrency is too low"
        )
    try:
        if is_given_up(threading.current_thread()):  # while it waited here
            raise ToolError(f"tool {tool.name!r} was not called: its caller has stopped waiting")
        yield
    finally:
        slots.release()


def shorten(text: str, limit: int | None) -> str:
    """At most `limit` characters of `text`, its head and its tail, with a note about the rest.

    >>> shorten("0123456789", 4)
    '01\\n[... 6 characters left out ...]\\n89'
    """
    if limit is None or len(text) <= limit:
        return text
    tail = limit // 2
    head = limit - tail
    return text[:head] + CUT_NOTE.format(len(text) - limit) + text[len(text) - tail :]
