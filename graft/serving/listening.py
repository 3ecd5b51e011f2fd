"""A listening socket and a web server on it that slow and idle connections cannot stall.

    1,100 half-sent requests, 200 connections allowed:  each new one closes the oldest that has sent no
                                                        complete request head; a whole request is answered

A request head must arrive in HEAD_SECONDS, a response be taken in `seconds`. Between two requests a
connection stays open for `keep_alive` seconds: agents whose tools take minutes need more than a browser.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from graft.serving.connections import limited_protocol
from graft.serving.guard import App

HEAD_SECONDS = 10.0
KEEP_ALIVE = 5.0
LAST_SECONDS = 2.0
"""For answers that are being written when a server on an event loop ends."""
MAX_CONNECTIONS = 512
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


@asynccontextmanager
async def serving(
    app: App, listener: socket.socket, *, keep_alive: float, most: int
) -> AsyncIterator[None]:
    """Serve on the running event loop while the block lasts, without signal handlers.

    The listener stays bound and listening afterwards: requests wait there for the next block.
    """
    config = server_config(app, None, keep_alive=keep_alive, most=allow_files(most))
    from uvicorn.server import ServerState

    config.load()
    state = ServerState()
    own = listener.dup()  # the server closes its socket with itself
    server = await asyncio.get_running_loop().create_server(
        lambda: config.http_protocol_class(config=config, server_state=state, app_state={}),
        sock=own,
        backlog=most,
    )
    try:
        yield
    finally:
        server.close()
        for connection in [*state.connections]:
            connection.shutdown()  # closes an idle one; another closes behind its answer
        if state.tasks:
            await asyncio.wait([*state.tasks], timeout=LAST_SECONDS)
        left = [*state.tasks]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for connection in [*state.connections]:
            connection.transport.close()
        await asyncio.sleep(0)  # connections are lost in the next iteration of the loop


def server_config(
    app: App,
    seconds: float | None = 300.0,
    *,
    keep_alive: float = KEEP_ALIVE,
    most: int | None = None,
) -> Any:
    """Settings of a uvicorn.Server within the limits above."""
    try:
        import uvicorn
    except ImportError as error:
        raise ImportError(NEEDS) from error
    return uvicorn.Config(
        app,
        http=limited_protocol(HEAD_SECONDS, seconds, keep_alive, most or most_connections()),
        backlog=BACKLOG,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_keep_alive=int(keep_alive),
        timeout_graceful_shutdown=1,
    )


def most_connections(wanted: int | None = None) -> int:
    """Half of the files that this process may open, so that the application can open its own."""
    wanted = MAX_CONNECTIONS if wanted is None else wanted
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft < 0 else max(8, min(wanted, soft // 2))


def allow_files(connections: int) -> int:
    """Let this process open as many files as `connections` need; the number that it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * connections if hard < 0 else min(2 * connections, hard)
    if 0 <= soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return most_connections(connections)
