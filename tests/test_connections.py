"""HTTP connections within limits, of both parsers: what they answer, and what they refuse to read."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from graft.serving import connections
from graft.serving.listening import listening, serving

pytest.importorskip("uvicorn")

NO_HTTPTOOLS = pytest.mark.skipif(not importlib.util.find_spec("httptools"), reason="no httptools")
HEAD = b"POST /%d HTTP/1.1\r\nHost: x\r\n"
TEXT = b"Content-Length: 2\r\n\r\nhi"

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Any]]


@pytest.fixture(params=[pytest.param("httptools", marks=NO_HTTPTOOLS), "h11"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "h11":
        monkeypatch.setattr(connections, "find_spec", lambda name: None)
    return request.param


class Echo:
    """Answers with the path and the body; `lost` are the paths whose clients went away before."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.done = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        if scope["path"] == "/wait":
            gone = asyncio.Event()
            scope["state"]["connection"].watch(gone.set)
            await gone.wait()
            self.lost.append(scope["path"])
            self.done.set()
        text = scope["path"].encode() + b" " + body
        length = (b"content-length", str(len(text)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": text})


def talk(with_server: Talk, app: Any = None) -> Any:
    """What `with_server` returns, on a connection to the application."""

    async def run() -> Any:
        listener = listening("127.0.0.1", 0)
        listener.listen(8)
        try:
            async with serving(app or Echo(), listener, keep_alive=30, most=8):
                port = listener.getsockname()[1]
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    async with asyncio.timeout(20):
                        return await with_server(reader, writer)
                finally:
                    writer.close()
        finally:
            listener.close()

    return asyncio.run(run())


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ")[1])
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
    return status, await reader.readexactly(length)


def test_requests_in_pieces_in_chunks_and_ahead_are_answered_in_order(parser: str):
    async def ask(reader: Any, writer: Any) -> list[tuple[int, bytes]]:
        chunked = b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 20_000 + b"0\r\n\r\n"
        sent = HEAD % 1 + TEXT + HEAD % 2 + TEXT
        writer.write(sent[:9])
        await asyncio.sleep(0.01)
        writer.write(sent[9:])
        found = [await answer(reader), await answer(reader)]
        writer.write(HEAD % 3 + chunked)
        return [*found, await answer(reader)]

    assert talk(ask) == [(200, b"/1 hi"), (200, b"/2 hi"), (200, b"/3 " + b"a" * 20_000)]


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What comes before the server closes the connection."""
    found = b""
    with suppress(ConnectionError):
        while piece := await reader.read(4096):
            found += piece
    return found


@pytest.mark.parametrize(
    "text", [b"X: " + b"a" * 99_999, b"X: y\r\n" * 20_000, b"no head\r\n\r\n", b"\r\n" * 99_999]
)
def test_a_head_that_is_too_long_and_what_is_no_head_are_refused(parser: str, text: bytes):
    async def ask(reader: Any, writer: Any) -> bytes:
        writer.write(HEAD % 1 if text[:1] == b"X" else text[:4])
        await asyncio.sleep(0.01)
        writer.write(text)
        return await rest(reader)

    assert b"200" not in talk(ask)


def test_a_chunked_body_cannot_end_with_more_than_a_head(parser: str):
    async def ask(reader: Any, writer: Any) -> bytes:
        writer.write(HEAD % 1 + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n")
        for _ in range(5):
            await asyncio.sleep(0.002)
            writer.write(b"X: " + b"a" * 20_000 + b"\r\n")
        return await rest(reader)

    assert b"200" not in talk(ask)


def test_an_offer_of_another_protocol_is_answered_in_this_one(parser: str):
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"

    async def ask(reader: Any, writer: Any) -> list[tuple[int, bytes]]:
        writer.write(HEAD % 1 + offer + TEXT)
        first = await answer(reader)
        writer.write(HEAD % 2 + TEXT)
        return [first, await answer(reader)]

    assert talk(ask) == [(200, b"/1 hi"), (200, b"/2 hi")]


def test_a_tunnel_is_refused(parser: str):
    async def ask(reader: Any, writer: Any) -> bytes:
        writer.write(b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n")
        return await rest(reader)

    if parser == "httptools":  # h11 leaves it to the application: the guard answers no such method
        assert talk(ask).startswith(b"HTTP/1.1 400")


def test_an_application_learns_that_its_client_is_gone(parser: str):
    async def ask(reader: Any, writer: Any) -> list[str]:
        writer.write(HEAD % 1 + TEXT)
        await answer(reader)
        writer.write(b"POST /wait HTTP/1.1\r\nHost: x\r\n" + TEXT)
        await asyncio.sleep(0.02)
        assert not app.lost
        writer.transport.abort()
        await app.done.wait()
        return app.lost

    app = Echo()
    assert talk(ask, app) == ["/wait"]


class Wire:
    """A transport that remembers what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.written.append(data)

    def close(self) -> None:
        self.is_closed = True


ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


def test_a_head_is_written_with_its_body() -> None:
    wire = Wire()
    soon: list[Callable[[], None]] = []
    transport = connections.JoinedTransport(wire, soon.append)
    transport.write(ANSWER)
    assert wire.written == []
    transport.write(b"{}")
    transport.write(b"more")
    soon[0]()
    assert wire.written == [ANSWER + b"{}", b"more"]


@pytest.mark.parametrize("flush", ["turn", "close"])
def test_a_head_without_a_body_goes_at_the_next_turn_or_before_the_end(flush: str) -> None:
    wire = Wire()
    soon: list[Callable[[], None]] = []
    transport = connections.JoinedTransport(wire, soon.append)
    transport.write(ANSWER)
    end = soon[0] if flush == "turn" else transport.close
    end()
    assert wire.written == [ANSWER] and wire.is_closed == (flush == "close")
