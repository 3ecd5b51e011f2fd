"""One request on its way through the app, and the stream of an answer that takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic_core import to_json

from graft.gateway.dialects.dialect import Dialect
from graft.gateway.dialects.fields import describe_value
from graft.gateway.http.body import read_body
from graft.gateway.http.rules import Place
from graft.gateway.request import RefusedRequest
from graft.serving.guard import Send

PING_SECONDS = 10.0
"""Between two pings of a stream while the policy samples."""
FIRST_SECONDS = 0.25
"""A stream begins this late, so that a request that is refused at once gets an HTTP status."""

STREAM = b"text/event-stream; charset=utf-8"


class Caller(NamedTuple):
    """A request: what it asks for, and how it is answered."""

    method: str
    place: Place
    headers: Mapping[str, str]
    receive: Any
    send: Send
    watch: Callable[[Callable[[], Any] | None], None]
    """Sets what is called if the client closes the connection."""

    async def body(self) -> Mapping[str, Any]:
        """The JSON object that was sent; an empty body is an empty object."""
        message = await self.receive()  # the guard hands over the body as a whole
        raw = message.get("body", b"")
        if (coding := self.headers.get("content-encoding", "identity")) != "identity":
            raise RefusedRequest(
                f"content-encoding {describe_value(coding)} is not read; send plain JSON"
            )
        return await read_body(raw)

    async def reply(self, status: int, content: Any) -> None:
        """One whole answer as JSON; bytes are JSON already."""
        body = content if isinstance(content, bytes) else to_json(content)
        await self.begin(status, b"application/json", length=len(body))
        await self.send({"type": "http.response.body", "body": body})

    async def begin(self, status: int, kind: bytes, length: int | None = None) -> None:
        headers = [(b"content-type", kind)]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, events: bytes, more: bool = True) -> None:
        await self.send({"type": "http.response.body", "body": events, "more_body": more})


class EventStream:
    """A streamed answer that begins when it takes longer than FIRST_SECONDS, and is kept open with pings."""

    def __init__(self, caller: Caller, dialect: Dialect) -> None:
        self.caller, self.dialect = caller, dialect
        self.has_begun = False
        self._pings: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(FIRST_SECONDS, self._start)

    def _start(self) -> None:
        self._pings = asyncio.ensure_future(self._ping())

    async def _ping(self) -> None:
        await self.begin()
        while True:
            await self.caller.write(self.dialect.ping())
            await asyncio.sleep(PING_SECONDS)

    async def begin(self) -> None:
        if not self.has_begun:
            await self.caller.begin(200, STREAM)
            self.has_begun = True

    async def stop(self) -> None:
        """No more pings."""
        self._timer.cancel()
        if self._pings is not None:
            self._pings.cancel()
            await asyncio.gather(self._pings, return_exceptions=True)
