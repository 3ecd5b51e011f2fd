"""Several servers with the same weights: which contexts each serves, which are out of order.

    contexts   a b c d   ->   server 1: a c    server 2: b d      forks stay with their prefix cache
    server 2 dies        ->   server 1: a c b d                   until it takes the next weights

Servers keep a tag with their weights, "RUN-v3", and return it. RUN is a hash of the folder that weights
are exchanged in, so several processes of a run can use the same servers while one of them loads: a later
version of the run is accepted. Any other tag is a stale engine.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import suppress

from graft.engine.errors import EngineError
from graft.engine.remote.endpoint import EndpointError
from graft.engine.remote.server_protocol import Server, ServerProtocol


class ServerPool:
    """The servers of an engine, and the version of their weights."""

    def __init__(
        self, protocol: ServerProtocol, urls: Sequence[str], run: str, api_key_env: str = ""
    ) -> None:
        self.protocol, self.run = protocol, run
        self.servers = [Server(url, protocol.deadline, api_key_env) for url in urls]
        self.version = 0
        self.num_loads = 0
        """Loads by this process."""
        self.is_inspected = False

    def pick(self) -> Server | None:
        """The working server with the fewest contexts."""
        working = [server for server in self.servers if not server.fault]
        return min(working, key=lambda server: server.num_contexts, default=None)

    async def pick_or_revive(self) -> Server:
        """Pick a server; if none works, one that answers again with the weights it had before."""
        picked = self.pick()
        if picked is not None:
            return picked
        for server in self.servers:
            with suppress(EngineError):
                now = await self.protocol.read_tag(server)
                if now == server.tag or (now is None and not self.num_loads):
                    server.fault = ""
                    return server
        faults = "; ".join(f"server {server.url}: {server.fault}" for server in self.servers)
        raise EngineError(f"{self.protocol.where} has no server left: {faults}")

    def exclude(self, server: Server, error: EndpointError) -> None:
        """Send no more requests to a server that failed; raises the error if it was the last."""
        server.fault = str(error)
        if all(other.fault for other in self.servers):
            raise error
        logging.getLogger("graft").warning(
            "%s: server %s is excluded until the next weights: %s. Other servers take its samples",
            self.protocol.where,
            server.url,
            error,
        )

    async def inspect(self) -> None:
        """EngineError with the address and the fault, unless every server can be used."""
        for server in self.servers:
            try:
                await self.protocol.inspect(server)
                await self.protocol.check_temperature(server)
            except EngineError as error:
                raise EngineError(f"{self.protocol.where}: server {server.url}: {error}") from None
            server.tag = server.tag or await self.protocol.read_tag(server)
        self.is_inspected = True

    def tag_of(self, version: int) -> str:
        return f"{self.run}-v{version}"

    def set_version(self, version: int) -> None:
        """Another process of the run gave the servers these weights."""
        self.version = version
        for server in self.servers:
            server.tag = self.tag_of(version)

    def version_of(self, tag: str | None) -> int:
        """The version in a tag of this run; the version of the pool for other tags."""
        found = re.fullmatch(rf"{self.run}-v(\d+)", tag or "")
        return int(found[1]) if found else self.version

    def check_tag(self, server: Server, now: str, before: str) -> None:
        """EndpointError unless `now` is a later version of this run than `before`."""
        if now.startswith(f"{self.run}-v") and self.version_of(now) > self.version_of(before):
            return
        raise EndpointError(
            f"{self.protocol.where}: server {server.url} is a stale engine: it has the weights {now!r}, "
            f"not {before!r}. Was it restarted, or does another run use it too?"
        )
