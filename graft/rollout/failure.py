"""A failed rollout is data: `boundary` turns an exception into the status of a leaf."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from graft.engine.errors import EngineError
from graft.tools.errors import ToolError
from graft.types import Status
from graft.user_code import NotFinite, UserCodeError, user_frame

T = TypeVar("T")
R = TypeVar("R")

MAX_TRACE = 8000
"""Characters of a traceback that an episode keeps: its end."""

_shown: set[str] = set()


class RolloutFailure(Exception):
    """An attempt cannot continue; `status` is the cause, the text what was seen."""

    def __init__(self, status: Status, reason: str, trace: str = "") -> None:
        super().__init__(reason)
        self.status = status
        self.trace = trace
        """The traceback of the code that raised; "" where none did, as at a deadline."""

    def write(self, info: dict[str, Any]) -> None:
        """Into the info of the span where it happened."""
        info["error"] = str(self)
        if self.trace:
            info["traceback"] = self.trace


@asynccontextmanager
async def together() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup that raises its first failure instead of a group of exceptions.

    Not by a starred except clause, which before Python 3.11.4 wraps an exception raised inside it.
    """
    first: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as broken:
        first = broken
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
    if first is not None:  # raised out here, so that the group is no part of its traceback
        raise first


async def concurrently(
    work: Callable[[T], Awaitable[R]], items: Iterable[T], limit: int | None = None
) -> list[R]:
    """The results of `work` in the order of the items, at most `limit` calls at a time.

    The next item starts as soon as any call ends. The first failure cancels the others and is raised.
    """
    gate = asyncio.Semaphore(limit) if limit is not None else None

    async def one(item: T) -> R:
        try:
            return await work(item)
        finally:
            if gate is not None:
                gate.release()

    async with together() as group:
        running: list[asyncio.Task[R]] = []
        for item in items:
            if gate is not None:
                await gate.acquire()
            running.append(group.create_task(one(item)))
    return [task.result() for task in running]


@asynccontextmanager
async def boundary(
    what: str, deadline: float, key: str = "rollout.deadline"
) -> AsyncIterator[None]:
    """Name a step in users' code; an exception in it is a RolloutFailure of this trajectory only.

    `EngineError` and `ToolError` keep their own status, passing the deadline is a TIMEOUT, and any
    other exception inside "env ..." is that environment's. Exceptions elsewhere are bugs of ours and
    are raised, and so is a UserCodeError: an environment that returns something of a wrong type will do
    so again. `key` of the recipe is where the deadline comes from.
    """
    clock = asyncio.timeout(deadline)
    try:
        async with clock:
            yield
    except TimeoutError as error:
        if clock.expired():  # not one that the code itself raised
            inside = getattr(error.__cause__, "__notes__", [])
            why = f"waited {deadline:g} s for {', '.join([what, *inside])} ({key})"
            raise RolloutFailure(Status.TIMEOUT, why) from error
        raise failure(Status.ENV_ERROR, what, error) from error
    except RolloutFailure:  # it has its status already
        raise
    except EngineError as error:
        raise RolloutFailure(Status.ENGINE_ERROR, f"{what}: {error}") from error
    except ToolError as error:
        trace = "" if error.__cause__ is None else trace_of(error)
        raise RolloutFailure(Status.TOOL_ERROR, f"{what}: {error}", trace) from error
    except (Exception, SystemExit) as error:  # exit() in an env's code does not end the run
        if isinstance(error, NotFinite) and what.startswith("env"):
            raise RolloutFailure(Status.ENV_ERROR, f"{what}: {error}") from error
        if isinstance(error, UserCodeError) or not what.startswith("env"):
            raise
        raise failure(Status.ENV_ERROR, what, error) from error


def failure(status: Status, what: str, error: BaseException) -> RolloutFailure:
    """An exception of an environment: what it is, the user's line where it was raised, the traceback."""
    at = f" (at {frame})" if (frame := user_frame(error)) else ""
    return RolloutFailure(status, f"{what}: {type(error).__name__}: {error}{at}", trace_of(error))


def trace_of(error: BaseException) -> str:
    trace = "".join(traceback.format_exception(error))
    if os.environ.get("GRAFT_DEBUG") and trace not in _shown:  # once: attempts fail by the hundred
        _shown.add(trace)
        print(trace, file=sys.stderr, flush=True)
    return trace[-MAX_TRACE:]
