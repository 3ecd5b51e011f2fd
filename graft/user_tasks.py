"""Coroutines of users on graft's event loops: an agent's, an asynchronous tool's, and tasks that they start.

asyncio lets exit() and KeyboardInterrupt of any task end the whole loop, and a GeneratorExit closes the
coroutines that wait for it. In `contained`, and in tasks that are started inside `containing_tasks`, they
fail the coroutine, as every other exception does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from graft.user_code import describe_error, is_users

T = TypeVar("T")

_is_users_own: ContextVar[bool] = ContextVar("graft_is_users_own", default=False)


class Interruption(RuntimeError):
    """What would have ended the event loop."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(describe_error(error))
        self.error = error


async def contained(work: Awaitable[T]) -> T:
    """The result of `work`, or an Interruption in place of what would end the loop."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        if not isinstance(error, SystemExit) and not is_users(error):
            raise
        raise Interruption(error) from error


@contextmanager
def containing_tasks() -> Iterator[None]:
    """Contain the tasks that are started inside the block, and theirs."""
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is None:
        loop.set_task_factory(_make_task)
    token = _is_users_own.set(True)
    try:
        yield
    finally:
        _is_users_own.reset(token)


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(contained(work) if _is_users_own.get() else work, loop=loop, **options)
