"""Fields of a request, checked: whatever a client sends is read or refused with the name of the field."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from graft.gateway.request import RefusedRequest

MAX_DEPTH = 64
"""Of nested lists and objects. Schemas of tools have about ten; code behind this one may recurse."""
MAX_ITEMS = {"messages": 10_000, "input": 10_000, "tools": 1_000}
"""Of the lists of a request; of any other, MAX_OTHERS. Each item is hashed, rendered and kept."""
MAX_OTHERS = 10_000
MAX_ANSWERS = 128
MAX_STOPS = 16
_KINDS = {bool: "true or false", str: "a text", list: "a list", dict: "an object"}
MAX_FIELDS = 256
MAX_NOTED = 64
log = logging.getLogger("graft")
_noted: set[str] = set()


class RequestFields:
    """A JSON object of a request; `path` is its place, for messages: "messages.2.content.0"."""

    def __init__(self, values: Any, path: str = "") -> None:
        if not isinstance(values, dict):
            place = path or "the body"
            raise RefusedRequest(
                f"{place} must be a JSON object, not {describe_value(values)}", param=path
            )
        self.values, self.path = values, path

    def place(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def get(self, name: str) -> Any:
        """The value; None where it is absent or null."""
        return self.values.get(name)

    def refused(self, name: str, why: str) -> RefusedRequest:
        place = self.place(name)
        return RefusedRequest(f"{place} {why}", param=place)

    def required(self, name: str) -> Any:
        if (value := self.get(name)) is None:
            raise self.refused(name, "is required")
        return value

    def text(self, name: str, default: str = "") -> str:
        return self._typed(name, str, default)

    def name(self, name: str) -> str:
        """A text that is there and not empty."""
        self.required(name)
        if not (text := self.text(name)):
            raise self.refused(name, "is empty")
        return text

    def flag(self, name: str, default: bool = False) -> bool:
        return self._typed(name, bool, default)

    def fields(self, name: str) -> RequestFields:
        """An object; one without fields where it is absent."""
        return RequestFields(self._typed(name, dict, {}), self.place(name))

    def objects(self, name: str) -> list[RequestFields]:
        values: list[Any] = self._typed(name, list, [])
        return [RequestFields(one, f"{self.place(name)}.{i}") for i, one in enumerate(values)]

    def items(self, name: str) -> Sequence[Any]:
        return self._typed(name, list, ())

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts that are not empty, or one of them alone: "a" -> ("a",)."""
        value = self.get(name)
        values = [value] if isinstance(value, str) else self._typed(name, list, [])
        if not all(isinstance(one, str) and one for one in values) or len(values) > MAX_STOPS:
            why = (
                f"must be at most {MAX_STOPS} texts that are not empty, not {describe_value(value)}"
            )
            raise self.refused(name, why)
        return tuple(values)

    def whole(self, name: str, low: int, high: int | None = None) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        # JavaScript has no integers: 5.0 is 5
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_whole = is_number and value == int(value)
        if not is_whole or value < low or (high is not None and value > high):
            limits = f"from {low}" if high is None else f"from {low} to {high}"
            raise self.refused(
                name, f"must be a whole number {limits}, not {describe_value(value)}"
            )
        return int(value)

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            raise self.refused(
                name, f"must be a number from {low:g} to {high:g}, not {describe_value(value)}"
            )
        return float(value)

    def parts(self, name: str) -> str | list[RequestFields]:
        """A content: a text, or a list of parts; "" where it is absent."""
        value = self.get(name)
        if value is None or isinstance(value, str):
            return value or ""
        if not isinstance(value, list):
            raise self.refused(
                name, f"must be a text or a list of parts, not {describe_value(value)}"
            )
        return self.objects(name)

    def check_type(self, known: str, why: str) -> None:
        """Refuse an object whose `type` is another one; without a type it is of the one that is known."""
        if (kind := self.text("type", known)) != known:
            raise self.refused("type", f"is {describe_value(kind)}: {why}")

    def _typed(self, name: str, kind: type, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self.refused(name, f"must be {_KINDS[kind]}, not {describe_value(value)}")
        if kind is list and len(value) > (most := MAX_ITEMS.get(name, MAX_OTHERS)):
            raise self.refused(name, f"has {len(value)} items; at most {most} are read")
        return value


def body_fields(
    body: Any,
    known: Collection[str],
    ignored: Collection[str],
    refused: Mapping[str, tuple[Sequence[Any], str]],
) -> RequestFields:
    """The fields of a whole request.

    known    fields that the dialect reads
    ignored  fields without effect on what is sampled here
    refused  name -> values that ask for nothing, and the reason why others are refused

    Other fields are ignored too, as a client of tomorrow may send them, and named once in the log.
    """
    fields = RequestFields(body)
    if len(fields.values) > MAX_FIELDS:
        raise RefusedRequest(
            f"the body has {len(fields.values)} fields; at most {MAX_FIELDS} are read"
        )
    check_json(fields.values)
    for name, value in fields.values.items():
        if value is None:
            continue
        if name in refused:
            harmless, why = refused[name]
            if value not in harmless:
                raise RefusedRequest(f"{name} is not supported here: {why}", param=name)
        elif name not in known and name not in ignored:
            _note_unknown(str(name)[:80])
    return fields


def describe_value(value: Any) -> str:
    """A value in a message, short."""
    if isinstance(value, str | list | tuple | dict) and len(value) > 80:
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_json(body: Mapping[str, Any]) -> None:
    """Refuse what could not be written as JSON again, level by level: the depth is the client's."""
    level: list[Any] = [body]
    texts: list[str] = []
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise RefusedRequest(f"the body is nested more than {MAX_DEPTH} levels deep")
        inner: list[Any] = []
        for value in level:
            kind = type(value)
            if kind is str:
                texts.append(value)
            elif kind is dict:
                inner += value
                inner += value.values()
            elif isinstance(value, list | tuple):
                inner += value
            elif isinstance(value, dict):
                inner += [*value, *value.values()]
            elif isinstance(value, str):
                texts.append(value)
            elif value is not None:
                _check_number(value)
        level = inner
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise RefusedRequest(
            "a text of the body is no valid Unicode: it has half of a surrogate pair"
        ) from error


def _check_number(value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise RefusedRequest(f"a number of the body is {value}, which is no JSON")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise RefusedRequest("a whole number of the body has more than 63 bits")
    if not isinstance(value, int | float):
        raise RefusedRequest(f"the body has a {type(value).__name__}, which is no JSON value")


def _note_unknown(name: str) -> None:
    """Name a field once, and only so many: whoever sends them chooses the names."""
    if name not in _noted and len(_noted) < MAX_NOTED:
        _noted.add(name)
        log.warning("the gateway ignores the field %r of requests, which it does not know", name)
