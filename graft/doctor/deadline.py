"""A check that hangs or raises becomes a failed line, and the next check goes on.

checked("search", ask_the_server, 10)    where the server does not answer
fail  search     no answer within 10 s
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable

from graft.deadlines import within
from graft.ours import is_ours
from graft.train.monitor.check import FAIL, Check
from graft.trust import NotTrusted

Probe = Callable[[], Iterable[Check] | Check]


def checked(name: str, probe: Probe, deadline: float) -> list[Check]:
    """The lines of a check, or one failed line with the reason."""

    def lines() -> list[Check]:  # a generator works while it is consumed: on the thread, too
        found = probe()
        return [found] if isinstance(found, Check) else list(found)

    try:
        return within(deadline, lines)
    except TimeoutError as error:
        return [Check(name, FAIL, str(error), "what it waits for is down or very slow")]
    except NotTrusted:
        raise  # of all checks, and --trust decides about it
    except (Exception, SystemExit) as error:  # user code may call exit()
        if os.environ.get("GRAFT_DEBUG"):
            traceback.print_exception(error)
        text = str(error) or "no message"
        if is_ours(type(error)) or type(error) is ValueError:
            return [Check(name, FAIL, text)]  # errors of graft itself already name a remedy
        hint = "GRAFT_DEBUG=1 shows where it happened"
        return [Check(name, FAIL, f"{type(error).__name__}: {text}", hint)]
