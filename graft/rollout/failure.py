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
from graft.user_code import NotFinite, UserCodeError, clean, describe_error, is_users, user_frame

T = TypeVar("T")
R = TypeVar("R")

MAX_TRACE = 8000
"""Characters of a traceback that an episode keeps: its end."""

OF_ENGINE = ("completion of", "scores of")
"""What a boundary names in which no code of the user runs."""

_shown: set[str] = set()


class RolloutFailure(Exception):
    """An attempt cannot continue; `status` is the cause, the text what was seen."""

    def __init__(self, status: Status, reason: str, trace: str = "") -> None:
        super().__init__(clean(reason))
        self.status = status
        self.trace = clean(trace, MAX_TRACE)
        """The traceback of the code that raised; "" where none did, as at a deadline."""

    @property
    def mistake(self) -> UserCodeError | None:
        """The value of a wrong kind that the user's code returned, where that is the cause."""
        cause = self.__cause__
        if isinstance(cause, UserCodeError) and not isinstance(cause, NotFinite):
            return cause
        return None

    def add(self, reason: str) -> None:
        """Say more of what was seen."""
        self.args = (clean(f"{self}; {reason}"),)

    def write(self, info: dict[str, Any]) -> None:
        """Write it into the info of the span where it happened."""
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

    async def run_item(item: T) -> R:
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
            running.append(group.create_task(run_item(item)))
    return [task.result() for task in running]


@asynccontextmanager
async def boundary(
    what: str, deadline: float, key: str = "rollout.deadline"
) -> AsyncIterator[None]:
    """Name a step in users' code; an exception in it is a RolloutFailure of this trajectory only.

    `EngineError` and `ToolError` keep their own status, passing the deadline is a TIMEOUT, and whatever
    else the user's code raises is an ENV_ERROR: exit(), a cancellation that nobody asked for, an
    interrupt that is no Ctrl-C. Exceptions of the engine (OF_ENGINE) are bugs of ours and are raised.
    `key` of the recipe is where the deadline comes from.
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
    except BaseException as error:
        if what.startswith(OF_ENGINE) or not is_attempts_own(error):
            raise
        raise failure(Status.ENV_ERROR, what, error) from error


def is_attempts_own(error: BaseException) -> bool:
    """Whether an exception belongs to the attempt: else the run itself is to end."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and not task.cancelling()
    return not isinstance(error, KeyboardInterrupt | GeneratorExit) or is_users(error)


def failure(status: Status, what: str, error: BaseException) -> RolloutFailure:
    """An exception of an environment: what it is, the user's line where it was raised, the traceback."""
    if isinstance(error, UserCodeError):  # it names object and line itself
        trace = "" if error.__cause__ is None else trace_of(error)
        return RolloutFailure(status, f"{what}: {error}", trace)
    at = f" (at {frame})" if (frame := user_frame(error)) else ""
    return RolloutFailure(status, f"{what}: {describe_error(error)}{at}", trace_of(error))


class CommonMistake:
    """What the failed attempts of a collection have in common.

    One attempt that returns nonsense is data. If all of them fail, each by a value that cannot be used,
    the user's code is wrong: its error is raised.
    """

    def __init__(self) -> None:
        self._first: UserCodeError | None = None
        self._has_others = False

    def note(self, failure: RolloutFailure) -> None:
        self._first = self._first or failure.mistake
        self._has_others = self._has_others or failure.mistake is None

    def check(self, statuses: Iterable[Status]) -> None:
        """Raise the mistake if no attempt with one of these statuses came to an end."""
        is_lost = not any(status.is_trainable for status in statuses)
        if self._first is not None and is_lost and not self._has_others:
            raise self._first


def trace_of(error: BaseException) -> str:
    trace = "".join(traceback.format_exception(error))
    if os.environ.get("GRAFT_DEBUG") and trace not in _shown:  # once: attempts fail by the hundred
        _shown.add(trace)
        print(trace, file=sys.stderr, flush=True)
    return trace[-MAX_TRACE:]
