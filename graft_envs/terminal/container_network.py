"""One port of this computer inside a container that has no network.

A socket belongs to the network in which it was made, and not to who accepts its connections. A child
process enters the container's network, listens at 127.0.0.1 there, and hands the socket over; `relaying`
passes its connections on to the same port of this computer. So the container needs no network, no volume
and no program of ours.

Entering needs root, or, for rootless podman, the user who started the container.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

LOCAL = "127.0.0.1"
BACKLOG = 128
ENTER_SECONDS = 30.0
CHUNK = 1 << 16


class UnreachableNetwork(OSError):
    """A network of a container that this user cannot enter."""


def listen_inside(pid: int, port: int) -> socket.socket:
    """A socket that listens at 127.0.0.1:port in the network of process `pid`."""
    ours, childs = socket.socketpair()
    with ours, childs:
        words = [sys.executable, "-I", __file__, str(pid), str(port), str(childs.fileno())]
        done = subprocess.run(
            words,
            pass_fds=[childs.fileno()],
            capture_output=True,
            text=True,
            timeout=ENTER_SECONDS,
            check=False,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise UnreachableNetwork(
                f"the network of the container cannot be entered ({last}). An agent inside a container "
                "reaches the gateway that way: run as root, or with rootless podman"
            )
        _, [descriptor], _, _ = socket.recv_fds(ours, 1, 1)
    return socket.socket(fileno=descriptor)


@contextmanager
def relaying(listener: socket.socket, port: int) -> Iterator[None]:
    """Pass connections on to this computer's 127.0.0.1:port, on a thread, while the block lasts."""
    loop, is_over = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        server = await asyncio.start_server(_connector(port), sock=listener)
        await is_over.wait()
        server.close()
        # the Runner cancels connections that are still open, and their writers close

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, name="graft container relay", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join()
        listener.close()


def _connector(port: int):
    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError), closing(writer):
            there, back = await asyncio.open_connection(LOCAL, port)
            with closing(back):
                await asyncio.gather(_pass_on(reader, back), _pass_on(there, writer))

    return connect


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while part := await reader.read(CHUNK):
            writer.write(part)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.close()  # the other side has gone: so does this one


def _enter(pid: int) -> None:
    """Become part of the network of a process; of a rootless container through its user namespace."""
    setns = ctypes.CDLL(None, use_errno=True).setns
    kinds = ("net",) if os.geteuid() == 0 else ("user", "net")
    for kind in kinds:
        place = Path(f"/proc/{pid}/ns/{kind}")
        with place.open() as file:
            if setns(file.fileno(), 0):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(place))


def _main(pid: int, port: int, channel: int) -> None:
    _enter(pid)
    made = socket.create_server((LOCAL, port), backlog=BACKLOG)
    with made, socket.socket(fileno=channel) as sender:
        socket.send_fds(sender, [b"."], [made.fileno()])


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
