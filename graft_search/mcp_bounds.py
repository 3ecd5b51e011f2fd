"""Limits on what an MCP server sends: the library collects messages of any length."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import AsyncIterator, Callable
from encodings.utf_8 import IncrementalDecoder
from typing import Any

MAX_MESSAGE = 8 * 2**20
"""Bytes of one message of a server: a list of tools, a result."""


def bounded(stream: Any, is_events: bool, refuse: Callable[[str], Any]) -> Any:
    """The bytes of an HTTP answer, up to `MAX_MESSAGE`; of a stream of events, of each event."""
    import httpx2  # comes with mcp

    class BoundedStream(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            count, end = 0, b""
            async for piece in stream:
                count += len(piece)
                text = (end + piece).replace(b"\r\n", b"\n")
                if is_events and b"\n\n" in text:  # an empty line ends an event
                    count = len(text) - text.rfind(b"\n\n")
                end = piece[-3:]
                if count > MAX_MESSAGE:
                    refuse(_too_long())
                yield piece

        async def aclose(self) -> None:
            await stream.aclose()

    return BoundedStream()


class BoundedLines(IncrementalDecoder):
    """UTF-8, line by line. A line of more than `MAX_MESSAGE` becomes an error, the answer to its request:

    {"jsonrpc": "2.0", "id": 3, "result": ...  ->  {"jsonrpc": "2.0", "id": 3, "error": ...}
    """

    def __init__(self, errors: str = "strict") -> None:
        super().__init__(errors)
        self._parts: list[str] = []
        self._length = 0

    def decode(self, input: Any, final: bool = False) -> str:
        lines: list[str] = []
        for number, part in enumerate(super().decode(input, final).split("\n")):
            if number:  # the line before is complete
                lines.append("".join(self._parts))
                self._parts, self._length = [], 0
            if self._length > MAX_MESSAGE:
                continue
            self._parts.append(part)
            self._length += len(part)
            if self._length > MAX_MESSAGE:
                self._parts = [_refusal("".join(self._parts)[:200])]
        return "".join(f"{line}\n" for line in lines)


def _refusal(start: str) -> str:
    found = re.search(r'"id"\s*:\s*(\d+|"[^"]*")', start)
    error = {"code": -32001, "message": _too_long()}
    return json.dumps(
        {"jsonrpc": "2.0", "id": json.loads(found[1]) if found else None, "error": error}
    )


def _too_long() -> str:
    return f"the server sent more than {MAX_MESSAGE / 2**20:g} MiB in one message"


BOUNDED_LINES = "graft_bounded_lines"
"""The library collects a line of any length; the encoding of the lines is where it can be bounded."""


def _bounded_lines(name: str) -> codecs.CodecInfo | None:
    if name != BOUNDED_LINES:
        return None
    plain = codecs.lookup("utf-8")
    return codecs.CodecInfo(plain.encode, plain.decode, incrementaldecoder=BoundedLines, name=name)


codecs.register(_bounded_lines)
