"""Tasks that an agent's own code starts on the event loop of the run, as `asyncio.gather` does.

asyncio lets exit() and KeyboardInterrupt of any task end the whole loop, and a GeneratorExit closes the
coroutines that wait for it. Inside `containing_tasks` they fail the task, as every other exception does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from graft.user_code import describe_error, is_users

_is_agents: ContextVar[bool] = ContextVar("graft_is_agents", default=False)


@contextmanager
def containing_tasks() -> Iterator[None]:
    """Contain the tasks that are started inside the block, and theirs."""
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is None:
        loop.set_task_factory(_make_task)
    token = _is_agents.set(True)
    try:
        yield
    finally:
        _is_agents.reset(token)


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(_contained(work) if _is_agents.get() else work, loop=loop, **options)


async def _contained(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        if not isinstance(error, SystemExit) and not is_users(error):
            raise
        raise RuntimeError(describe_error(error)) from error
