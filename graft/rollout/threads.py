"""Blocking calls of other people's code, each on a thread that can be given up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Errand(threading.Thread):
    """A thread for one call. It cannot be killed, but it can know that nobody waits any more."""

    is_given_up = False


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Await `function(*args)` on a daemon thread of its own.

    A pool would not do: a call that never returns keeps its worker, 200 of them the whole pool, and
    closing the event loop or leaving the program would wait for it. Here the waiting side gives up
    at its deadline and says so on the thread (`graft.tools.calling` looks there), and the thread
    ends with the process at the latest.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def deliver(result: Any, error: Exception | None) -> None:
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
            failure = _as_failure(error)
        with suppress(RuntimeError):  # the event loop is gone: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, failure)

    name = f"graft-{getattr(function, '__name__', 'call')}"
    errand = Errand(target=run, daemon=True, name=name)
    errand.start()
    try:
        return await future
    except asyncio.CancelledError:
        errand.is_given_up = True
        raise


def _as_failure(error: BaseException) -> Exception:
    """What a future can carry. SystemExit and its like would end the program that awaits it, and a
    future refuses StopIteration, so that the waiting side would never hear of it."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    failure = RuntimeError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
