"""A listening socket and a web server on it that slow and idle connections cannot stall.

    1,100 half-sent requests, 200 connections allowed:  each new one closes the oldest that has sent no
                                                        complete request head; a whole request is answered

A request head must arrive in HEAD_SECONDS, a response be taken in `seconds`.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable
from typing import Any

from graft.serving.guard import App

HEAD_SECONDS = 10.0
MOST_CONNECTIONS = 512
BACKLOG = 128
"""Connections that the kernel accepts ahead: they are open files before they are counted."""
NEEDS = 'this service needs starlette and uvicorn: pip install "graft-rl[serve]"'


def listening(host: str, port: int) -> socket.socket:
    """A socket bound to `host` and `port`, for IPv4 or IPv6."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        server = socket.socket(family, kind, protocol)
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(address)
        except BaseException:
            server.close()
            raise
    except OSError as error:
        why = error.strerror or str(error)
        raise ValueError(
            f"cannot listen on {host}, port {port}: {why}; name another, or port 0 for a free one"
        ) from error
    return server


def address_of(listener: socket.socket) -> str:
    """ "http://127.0.0.1:8000", "http://[::1]:8000" """
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve_app(
    app: App, listener: socket.socket, ready: Callable[[], None], seconds: float | None = 300.0
) -> None:
    """Serve an application on a bound socket until interrupted; `ready` is called when it listens.

    seconds   for a request after its head, with the response; None: any time, for streams
    """
    config = server_config(app, seconds)
    import uvicorn

    listener.listen(BACKLOG)
    ready()
    uvicorn.Server(config).run(sockets=[listener])


def server_config(app: App, seconds: float | None = 300.0) -> Any:
    """Settings of a uvicorn.Server within the limits above."""
    try:
        import uvicorn
    except ImportError as error:
        raise ImportError(NEEDS) from error
    return uvicorn.Config(
        app,
        http=_limited_protocol(seconds),
        backlog=BACKLOG,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_graceful_shutdown=1,
    )


def most_connections() -> int:
    """Half of the files that this process may open, so that the application can open its own."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if soft < 0 else max(8, min(MOST_CONNECTIONS, soft // 2))


def _limited_protocol(seconds: float | None) -> type:
    from uvicorn.protocols.http.h11_impl import H11Protocol

    most = most_connections()
    idle: dict[LimitedProtocol, None] = {}
    """Connections without a request, the oldest first."""

    class LimitedProtocol(H11Protocol):
        timer: Any = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                oldest = next(iter(idle), self)
                idle.pop(oldest, None)
                oldest.transport.abort()
                if oldest is self:
                    return
            self._wait_for_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self in idle and self.cycle is not None and not self.cycle.response_complete:
                idle.pop(self)
                self._abort_after(seconds)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._wait_for_head()

        def connection_lost(self, exc: Exception | None) -> None:
            idle.pop(self, None)
            self._abort_after(None)
            super().connection_lost(exc)

        def _wait_for_head(self) -> None:
            idle[self] = None
            self._abort_after(HEAD_SECONDS)

        def _abort_after(self, seconds: float | None) -> None:
            if self.timer is not None:
                self.timer.cancel()
            self.timer = self.loop.call_later(seconds, self.transport.abort) if seconds else None

    return LimitedProtocol
