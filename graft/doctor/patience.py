"""A look that hangs or breaks is a line like any other, and the next one is taken.

made("search", ask_the_server, 10)    the server does not answer
fail  search     no answer within 10 s
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Generator, Iterable
from typing import Any

from graft.train.monitor.check import FAIL, Check

Look = Callable[[], Iterable[Check] | Check]


def made(name: str, look: Look, deadline: float) -> list[Check]:
    """The lines of a look, or the one line that says what became of it."""
    try:
        found = within(deadline, look)
        return [found] if isinstance(found, Check) else list(found)
    except TimeoutError as error:
        return [Check(name, FAIL, str(error), "whatever it waits for is down, or very slow")]
    except Exception as error:
        if os.environ.get("GRAFT_DEBUG"):
            traceback.print_exception(error)
        return [Check(name, FAIL, _told(error), _where_to_look(error))]


def within(deadline: float, call: Callable[[], Any]) -> Any:
    """What `call` returns, or a TimeoutError. A call that never returns is left alone on its thread,
    which ends with the process."""
    results: list[Any] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            found = call()
            # who yields lines works while they are taken: that must happen here
            results.append(list(found) if isinstance(found, Generator) else found)
        except Exception as error:
            errors.append(error)
        except BaseException as error:  # code of others that calls exit()
            errors.append(RuntimeError(f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=run, name="graft-doctor", daemon=True)
    thread.start()
    thread.join(deadline)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {deadline:g} s")
    if errors:
        raise errors[0]
    return results[0]


def _told(error: Exception) -> str:
    text = str(error) or "without a word"
    return text if _is_ours(error) else f"{type(error).__name__}: {text}"


def _where_to_look(error: Exception) -> str:
    """Our own errors say what to do."""
    return "" if _is_ours(error) else "GRAFT_DEBUG=1 shows where it happened"


def _is_ours(error: Exception) -> bool:
    return type(error).__module__.startswith("graft.") or type(error) is ValueError
