"""Calling a tool: with a text or with JSON arguments, and never more at a time than it can bear.

`concurrency` is a number on the tool. Tools of one class and name that state the same number share
its places, whichever env of the process they belong to: 64 envs with a `search` of concurrency 8
make at most 8 requests at a time.

A thread cannot be killed. Whoever waits for a call on a thread and gives up says so on the thread
(`is_given_up = True`, see `graft.rollout.threads`), and the call goes on alone:

    step 1   200 calls of `ask` hang, all are given up at the deadline
    step 2   `ask` is not called any more: ToolError at once, no thread hangs beside the 200
    later    some of the 200 come back, fewer than 64 are left: `ask` is called again
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from graft.tools import ERROR
from graft.tools.errors import ToolError
from graft.tools.schema import content_of
from graft.user_code import Giver, UserCodeError, refusal, user_frame

MAX_WAIT = 600.0  # seconds for a free place
MAX_GIVEN_UP = 64
"""Calls of one tool that were given up and still run, before no more are made."""
CUT_NOTE = "\n[... {} characters left out ...]\n"

_places: dict[tuple[type, str, int], threading.Semaphore] = {}
_under_way: dict[tuple[type, str], list[threading.Thread]] = {}
_lock = threading.Lock()


def call_tool(tool: Any, what: str | Mapping[str, Any]) -> str:
    """The answer of `tool` to a content, or to the arguments of a JSON call.

    call_tool(Calculator(), "34*5") -> "170"; call_tool(Calculator(), {"expression": "34*5"}) too.
    Whatever the tool raises is a ToolError here: a tool that breaks ends an attempt, not a program.
    """
    with noted(tool):
        if getattr(tool, "concurrency", None) is None:
            answer = _call(tool, what)
        else:
            with place(tool):
                answer = _call(tool, what)
    if not isinstance(answer, str):
        raise refusal(
            Giver(tool, "tool"), answer, "a text; a typed function may return anything JSON"
        )
    return answer


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
        raise ToolError(f"tool {tool.name!r} broke: {type(error).__name__}: {error}{at}") from error


@contextmanager
def noted(tool: Any) -> Iterator[None]:
    """Count a call among those under way, unless too many of them were given up."""
    with _lock:
        calls = _under_way.setdefault((type(tool), tool.name), [])
        # asked only where it matters: counting takes a look at every thread
        if len(calls) >= MAX_GIVEN_UP and sum(map(is_given_up, calls)) >= MAX_GIVEN_UP:
            raise ToolError(
                f"{MAX_GIVEN_UP} calls of tool {tool.name!r} were given up at their deadline and still "
                "run; no more are made until some come back. Give the tool a time limit of its own"
            )
        calls.append(threading.current_thread())
    try:
        yield
    finally:
        with _lock:
            calls.remove(threading.current_thread())


def is_given_up(thread: threading.Thread) -> bool:
    """True if nobody waits any more for what this thread does."""
    return getattr(thread, "is_given_up", False)


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
        if is_given_up(threading.current_thread()):  # while it waited here
            raise ToolError(f"tool {tool.name!r} was not called: nobody waits for it any more")
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
