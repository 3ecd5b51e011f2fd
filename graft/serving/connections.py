"""HTTP connections within limits: how long a request head may take, and how long it may be.

httptools, a parser in C, reads requests where it is installed: 0.07 ms each, where h11 in Python takes 0.3.
Both limit the head of a request, and h11 is stricter with trailers. The head of a response is sent with its
body (`JoinedTransport`): alone it costs a system call, and wakes the client for nothing. An application that
samples for minutes learns when its client is gone, without a task that waits for it:
scope["state"]["connection"].watch(function).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

MAX_HEAD = 64 * 1024
"""Bytes of a request beside its body: its head, and what a chunked body adds."""


class JoinedTransport:
    """A transport that holds the head of a response until its body, or until the event loop's next turn."""

    def __init__(self, inner: Any, call_soon: Callable[[Callable[[], None]], Any]) -> None:
        self._inner, self._call_soon = inner, call_soon
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.") and data.endswith(b"\r\n\r\n") and not self._head:
            self._head = data
            self._call_soon(self.flush)
        else:
            head, self._head = self._head, b""
            self._inner.write(head + data)

    def flush(self) -> None:
        if self._head:
            self.write(b"")

    def close(self) -> None:
        self.flush()
        self._inner.close()


def limited_protocol(
    head_seconds: float, seconds: float | None, keep_alive: float, most: int, is_fast: bool = True
) -> type:
    """The protocol of `most` connections.

    head_seconds   for a request head
    seconds        for a request after its head, with the response; None: any time
    keep_alive     between two requests
    is_fast        httptools, where it is installed
    """
    base: Any = _fast_protocol() if is_fast and find_spec("httptools") else _plain_protocol()
    idle: dict[LimitedProtocol, None] = {}
    """Connections without a request, the oldest first."""

    class LimitedProtocol(base):
        timer: Any = None
        has_begun = False  # a part of the next head is there
        on_lost: Callable[[], Any] | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(JoinedTransport(transport, self.loop.call_soon))
            self.app_state = {**self.app_state, "connection": self}
            if len(self.connections) > most:
                oldest = next(iter(idle), self)
                idle.pop(oldest, None)
                oldest.transport.abort()
                if oldest is self:
                    return
            self._wait_for_head(head_seconds)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self in idle and self.cycle is not None and not self.cycle.response_complete:
                idle.pop(self)
                self._abort_after(seconds)
            elif self in idle and not self.has_begun:
                self._wait_for_head(head_seconds)
                self.has_begun = True

        def on_response_complete(self) -> None:
            self.on_lost = None
            is_next_whole = bool(getattr(self, "pipeline", None))
            super().on_response_complete()
            if is_next_whole:  # it is answered now
                self._abort_after(seconds)
            else:
                self._wait_for_head(head_seconds if self.has_more() else keep_alive)

        @property
        def has_body(self) -> bool:
            """Whether the body of the last request is here as a whole, and so are those before it."""
            return self.cycle is not None and not self.cycle.more_body

        def watch(self, on_lost: Callable[[], Any] | None) -> None:
            """Call this once if the client is gone before it has its response; None: nothing."""
            self.on_lost = on_lost
            if on_lost is not None and self.transport.is_closing():
                on_lost()
            elif on_lost is not None:
                self.flow.resume_reading()  # a long body has paused it, and the end would not be seen

        def connection_lost(self, exc: Exception | None) -> None:
            idle.pop(self, None)
            self._abort_after(None)
            super().connection_lost(exc)
            on_lost, self.on_lost = self.on_lost, None
            if on_lost is not None:
                on_lost()

        def _wait_for_head(self, seconds: float) -> None:
            idle[self], self.has_begun = None, False
            self._abort_after(seconds)

        def _abort_after(self, seconds: float | None) -> None:
            if self.timer is not None:
                self.timer.cancel()
            self.timer = self.loop.call_later(seconds, self.transport.abort) if seconds else None

    return LimitedProtocol


def _plain_protocol() -> type:
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class PlainProtocol(H11Protocol):
        def has_more(self) -> bool:
            """Whether a part of the next request is there."""
            return bool(self.conn.trailing_data[0])

    return PlainProtocol


def _fast_protocol() -> type:
    import httptools  # type: ignore[import-not-found]
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class FastProtocol(HttpToolsProtocol):
        """uvicorn's, which limits neither heads nor trailers, and loses the body of an offered upgrade."""

        is_in_head = False
        beside = 0  # bytes of this request that are not its body, from its second piece on

        def has_more(self) -> bool:
            return self.is_in_head

        def data_received(self, data: bytes) -> None:
            self._unset_keepalive_if_required()
            self.beside += len(data)
            try:
                try:
                    self.parser.feed_data(data)
                except httptools.HttpParserUpgrade as offered:
                    self._decline(data[offered.args[0] :])
                if self.beside > MAX_HEAD:
                    raise httptools.HttpParserError(f"more than {MAX_HEAD} bytes")
            except httptools.HttpParserError:
                if self.cycle is None or self.cycle.response_complete:
                    self.send_400_response("Invalid HTTP request received.")
                else:  # an answer here would be taken for that of the request before
                    self.transport.abort()

        def _decline(self, rest: bytes) -> None:
            """Read a request that offers another protocol, such as h2c, as one that does not."""
            method, version = self.parser.get_method(), self.parser.get_http_version()
            if method == b"CONNECT":
                raise httptools.HttpParserError("a tunnel is asked for")
            kept = [one for one in self.headers if one[0] not in (b"connection", b"upgrade")]
            head = b"".join(b"%b: %b\r\n" % one for one in kept)
            self.parser = httptools.HttpRequestParser(self)
            first = b"%b %b HTTP/%b\r\n" % (method, self.url, version.encode())
            self.parser.feed_data(first + head + b"\r\n" + rest)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.is_in_head, self.beside = True, 0

        def on_headers_complete(self) -> None:
            if not self.parser.should_upgrade():
                self.is_in_head = False
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self.beside -= 8 * len(body)  # even a chunk of one byte has fewer around it
            super().on_body(body)

        def on_message_complete(self) -> None:
            if not self.parser.should_upgrade():
                self.beside = 0
                super().on_message_complete()

    return FastProtocol
