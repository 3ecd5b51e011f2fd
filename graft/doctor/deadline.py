"""A check that hangs or raises becomes a failed line, and the next check goes on.

checked("search", ask_the_server, 10)    where the server does not answer
fail  search     no answer within 10 s
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Generator, Iterable
from typing import Any

from graft.train.monitor.check import FAIL, Check

Probe = Callable[[], Iterable[Check] | Check]


def checked(name: str, probe: Probe, deadline: float) -> list[Check]:
    """The lines of a check, or one failed line with the reason."""
    try:
        found = within(deadline, probe)
        return [found] if isinstance(found, Check) else list(found)
    except TimeoutError as error:
        return [Check(name, FAIL, str(error), "what it waits for is down or very slow")]
    except Exception as error:
        if os.environ.get("GRAFT_DEBUG"):
            traceback.print_exception(error)
        text = str(error) or "no message"
        if type(error).__module__.startswith("graft.") or type(error) is ValueError:
            return [Check(name, FAIL, text)]  # errors of graft itself already name a remedy
        hint = "GRAFT_DEBUG=1 shows where it happened"
        return [Check(name, FAIL, f"{type(error).__name__}: {text}", hint)]


def within(deadline: float, call: Callable[[], Any]) -> Any:
    """What `call` returns, or a TimeoutError. A call that never returns stays on its daemon thread, which
    ends with the process."""
    results: list[Any] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            found = call()
            # a generator works while it is consumed: that must happen on this thread
            results.append(list(found) if isinstance(found, Generator) else found)
        except Exception as error:
            errors.append(error)
        except BaseException as error:  # user code that calls exit()
            errors.append(RuntimeError(f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=run, name="graft-doctor", daemon=True)
    thread.start()
    thread.join(deadline)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {deadline:g} s")
    if errors:
        raise errors[0]
    return results[0]
