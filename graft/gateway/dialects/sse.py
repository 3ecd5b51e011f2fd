"""Server-sent events: the lines of a streamed answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

COMMENT = b": ping\n\n"
"""Keeps a connection open; every client skips a comment."""
DONE = b"data: [DONE]\n\n"
PIECE = 2048
"""Characters of one delta. An answer is streamed when it is complete: pieces only keep events small."""


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    r"""One event, in ASCII: clients may split lines at U+2028 too.

    >>> event({"type": "ping"}, "ping")
    b'event: ping\ndata: {"type":"ping"}\n\n'
    """
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def pieces(text: str) -> Iterator[str]:
    """The text in pieces for deltas; none of an empty text."""
    return (text[at : at + PIECE] for at in range(0, len(text), PIECE))
