"""A failed rollout is data: one place turns what went wrong into a leaf's status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from graft.engine.errors import EngineError
from graft.tools.errors import ToolError
from graft.types import Status


class Failure(Exception):
    """An attempt cannot go on; `status` says whose fault, the text says what was seen."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@asynccontextmanager
async def boundary(what: str, deadline: float) -> AsyncIterator[None]:
    """Name a step that others' code takes; whatever goes wrong in it is a Failure of this path only.

    `EngineError` and `ToolError` keep their own status, passing the deadline is a TIMEOUT, and any
    other exception inside "env ..." is that environment's. Exceptions elsewhere are bugs of ours and
    go through.
    """
    clock = asyncio.timeout(deadline)
    try:
        async with clock:
            yield
    except TimeoutError as error:
        if clock.expired():  # not one that the code itself raised
            raise Failure(Status.TIMEOUT, f"waited {deadline:g} s for {what}") from error
        raise Failure(Status.ENV_ERROR, f"{what}: {type(error).__name__}: {error}") from error
    except EngineError as error:
        raise Failure(Status.ENGINE_ERROR, f"{what}: {error}") from error
    except ToolError as error:
        raise Failure(Status.TOOL_ERROR, f"{what}: {error}") from error
    except (Exception, SystemExit) as error:  # exit() in an env's code is no wish to end the run
        if not what.startswith("env"):
            raise
        raise Failure(Status.ENV_ERROR, f"{what}: {type(error).__name__}: {error}") from error
