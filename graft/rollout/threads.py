"""Blocking calls of other people's code, each on a thread that can be abandoned."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Await `function(*args)` on a daemon thread of its own.

    A pool would not do: a call that never returns keeps its worker, and closing the event loop or
    leaving the program would wait for it. Here the waiting side gives up at its deadline, and the
    thread ends with the process at the latest.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def deliver(result: Any, error: BaseException | None) -> None:
        if future.done():  # the deadline has passed
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = function(*args)
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # the event loop is gone: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, failure)

    threading.Thread(
        target=run, daemon=True, name=f"graft-{getattr(function, '__name__', 'call')}"
    ).start()
    return await future
