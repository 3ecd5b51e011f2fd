"""The address of the gateway: bound once, served on whichever event loop samples.

A run samples on one event loop per step, or on one of a thread, and evaluates on others. The socket is bound
for the whole run, so that URLs stay, and the server is a part of the loop that is running:

    address = GatewayAddress()              # http://127.0.0.1:41987
    async with address.serving(gateway):    # requests are answered from here on; entered many times at once
        ...
    address.close()

Requests that arrive between two loops, while the learner has the processor, wait in the socket's queue.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cached_property
from urllib.parse import urlsplit
from weakref import finalize

from graft.gateway.gateway import Gateway
from graft.gateway.http.app import GatewayApp
from graft.gateway.http.body import MAX_BODY
from graft.gateway.http.rules import GatewayRules
from graft.gateway.session import AgentSession
from graft.serving.guard import API_HEADERS, Guard, new_token
from graft.serving.listening import address_of, listening, serving

KEEP_ALIVE = 3600.0
"""Seconds that a connection may be idle: an agent's tools may take that long between two calls."""
MAX_CONNECTIONS = 4096
"""Several for each of 512 sessions: sub-agents call at the same time."""


class GatewayAddress:
    """A bound socket, and the server of the gateways that are in use."""

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, token: str = "", model: str = "policy"
    ) -> None:
        """Nothing is bound before the first use."""
        self.host, self.wanted_port = host, port
        self.app = GatewayApp(self.find, token or new_token(), model)
        self._gateways: list[Gateway] = []  # once per block that uses it
        self._server: AbstractAsyncContextManager[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()

    @cached_property
    def listener(self) -> socket.socket:
        """The bound socket."""
        made = listening(self.host, self.wanted_port)
        finalize(self, made.close)  # also where nothing calls `close`
        made.listen(MAX_CONNECTIONS)
        return made

    @property
    def url(self) -> str:
        return _reachable(address_of(self.listener))

    @property
    def token(self) -> str:
        """Opens sessions, and each of them."""
        return self.app.token

    def find(self, name: str) -> AgentSession | None:
        """The session with this key or id, of any gateway in use."""
        for gateway in dict.fromkeys(self._gateways):
            if (session := gateway.get(name) or gateway.find(name)) is not None:
                return session
        return None

    def urls(self, session: AgentSession) -> tuple[str, str]:
        """The base URL of a session for OpenAI's clients and for Anthropic's, which add /v1 themselves."""
        return f"{self.url}/s/{session.id}/v1", f"{self.url}/s/{session.id}"

    @asynccontextmanager
    async def serving(self, gateway: Gateway) -> AsyncIterator[None]:
        """Answer the sessions of a gateway while the block lasts, on the running event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._gateways:
                raise RuntimeError(
                    f"{self.url} is served on another event loop; use one address for each"
                )
            self._loop, self._lock = loop, asyncio.Lock()
        self._gateways.append(gateway)
        try:
            await self._start()
            yield
        finally:
            self._gateways.remove(gateway)
            await self._stop()

    async def _start(self) -> None:
        async with self._lock:
            if self._server is None:
                rules = GatewayRules(self.token, self.listener.getsockname(), self.find)
                server = serving(
                    Guard(self.app, rules, MAX_BODY, API_HEADERS),
                    self.listener,
                    keep_alive=KEEP_ALIVE,
                    most=MAX_CONNECTIONS,
                )
                await server.__aenter__()
                self._server = server

    async def _stop(self) -> None:
        async with self._lock:
            if not self._gateways and self._server is not None:
                if self.app.source is not None:
                    self.app.source.release()
                server, self._server = self._server, None
                await server.__aexit__(None, None, None)

    def close(self) -> None:
        """Free the address."""
        if "listener" in self.__dict__:
            self.listener.close()


def split_address(text: str) -> tuple[str, int]:
    """The host and the port of "127.0.0.1:8399", "[::1]:8399" or "localhost"; 0: no port is named."""
    try:
        parts = urlsplit(f"//{text}")
        return parts.hostname or "127.0.0.1", parts.port or 0
    except ValueError as error:
        raise ValueError(f"{text!r} is not an address such as 127.0.0.1:8399: {error}") from error


def _reachable(url: str) -> str:
    """The address for programs of this machine, where the socket is bound to all addresses."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    if host == "0.0.0.0":
        return f"http://127.0.0.1:{port}"
    if host == "[::]":
        return f"http://[::1]:{port}"
    return url
