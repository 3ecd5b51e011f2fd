"""`WeightUpdate`: new weights for a pool of servers, step by step.

    pause     every server stops its samples
    give ...  a folder to read, or one bucket of tensors after the other
    resume    every server, also one that failed

A server that fails a step is left out of the later ones, and gets no samples until the next weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from graft.engine.errors import EngineError
from graft.engine.remote.endpoint import EndpointError
from graft.engine.remote.server_pool import ServerPool
from graft.engine.remote.server_protocol import Server

SERVER_IS_DOWN = "Once a server is back, the same command resumes from the last checkpoint"


class WeightUpdate:
    """One version on its way to the servers; `tag` is what they keep with it."""

    def __init__(self, pool: ServerPool, version: int) -> None:
        self.pool, self.version, self.tag = pool, version, pool.tag_of(version)
        self.taking = list(pool.servers)
        self.has_answered = False
        """Whether a server answered, and did not take the weights."""
        pool.num_loads += 1
        for server in pool.servers:
            server.tag = self.tag  # also if it fails: its old weights are not to be used

    async def take(self, step: Callable[[Server], Awaitable[None]]) -> None:
        """One step on every server that has not failed."""
        done = await asyncio.gather(*(self._take(server, step) for server in self.taking))
        self.taking = [server for server, is_done in zip(self.taking, done, strict=True) if is_done]

    async def _take(self, server: Server, step: Callable[[Server], Awaitable[None]]) -> bool:
        try:
            await step(server)
        except EngineError as error:
            server.fault = str(error)
            self.has_answered |= not isinstance(error, EndpointError) or error.code > 0
            return False
        return True

    async def resume(self) -> None:
        """Resume every server: one that failed may serve other runs."""
        failed = [server for server in self.pool.servers if server not in self.taking]
        await self.take(self.pool.protocol.resume)
        for server in failed:
            with suppress(EngineError):
                await self.pool.protocol.resume(server)

    def finish(self, remedy: str) -> None:
        """EngineError if no server has the weights, with a `remedy` for servers that still answer.

        A server that was excluded before and took them is back.
        """
        for server in self.taking:
            server.fault = ""
        where, failed = self.pool.protocol.where, [s for s in self.pool.servers if s.fault]
        text = "; ".join(f"server {server.url}: {server.fault}" for server in failed)
        if not self.taking:
            if not self.has_answered:
                remedy = SERVER_IS_DOWN
            raise EngineError(f"{where}: no server took the new weights. {text}. {remedy}")
        if failed:
            logging.getLogger("graft").warning("%s continues without %s", where, text)
        self.pool.version = self.version
