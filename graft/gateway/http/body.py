"""The JSON of a request, within bounds that are checked before it is parsed.

A parsed body takes fifty times its bytes where it is a million small objects, and every step after the parser
visits each of them. So a large body is counted first, between its texts:

    {"messages": [{"role": "user", "content": "{[{["}]}     ->  { : [{ : , : }]}     3 objects, 3 deep

Large ones are counted and parsed on a thread: other sessions go on.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

from pydantic_core import from_json

from graft.gateway.dialects.fields import MAX_DEPTH, describe_value
from graft.gateway.request import RefusedRequest
from graft.rollout.user_calls import in_thread

MAX_BODY = 16 * 2**20
"""Bytes of a request: the text of a million tokens, most of them escaped."""
SMALL_BODY = 2**17
"""Bytes up to which a body is parsed at once: it cannot have enough objects to delay anybody."""
MAX_OBJECTS = 100_000
"""Objects and lists: a thousand messages of a hundred parts."""
MAX_VALUES = 200_000

_TEXT = re.compile(rb'"[^"\\]*+(?:\\(?:.|\Z)[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
"""A text, or what begins as one: it matches at every quote, so that a search takes one pass."""
_BRACKET = re.compile(rb"[\[\]{}]")


async def read_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body; an empty one is an empty object."""
    read = _parse(raw) if len(raw) <= SMALL_BODY else await in_thread(_parse_large, raw)
    if not isinstance(read, dict):
        raise RefusedRequest(f"the body must be a JSON object, not {describe_value(read)}")
    return read


def _parse_large(raw: bytes) -> Any:
    check_structure(raw)
    return _parse(raw)


def _parse(raw: bytes) -> Any:
    try:
        return from_json(raw) if raw.strip() else {}
    except ValueError as error:
        raise RefusedRequest(f"the body is not JSON: {error}") from error


def check_structure(raw: bytes) -> None:
    """Refuse a body with too many values or too many levels, without parsing it.

    A loop in Python, in which other threads have their turns; one pass of `re` would hold all of them up.
    """
    objects = values = depth = at = 0
    for text in chain(_TEXT.finditer(raw), [None]):
        piece = raw[at : len(raw) if text is None else text.start()]
        at = len(raw) if text is None else text.end()
        values += 1 if len(piece) < 2 else piece.count(b",")
        is_between = piece in (b":", b",")  # most of them
        objects += 0 if is_between else piece.count(b"{") + piece.count(b"[")
        if objects > MAX_OBJECTS or values > MAX_VALUES:
            raise RefusedRequest(
                f"the body has more than {MAX_OBJECTS} objects and lists, or {MAX_VALUES} values",
                "too_large",
            )
        for bracket in () if is_between else _BRACKET.findall(piece):
            depth += 1 if bracket in b"[{" else -1
            if depth > MAX_DEPTH:
                raise RefusedRequest(f"the body is nested more than {MAX_DEPTH} levels deep")
