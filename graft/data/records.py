r"""The starts of the rows of a text file: jsonl, json and csv, found without keeping the file in memory.

    {"a": 1}\n\n{"a": 2}\n        jsonl: rows start at bytes 0 and 10
    [{"a": 1}, {"a": 2}]          json:  at 1 and 11
    a,b\n1,"x\ny"\n2,z\n          csv:   at 4 and 12; the header names the fields of all of them

A row reaches to where the next one starts; the separator between the two (a comma, blank lines) is
ignored when the row is parsed. So a table needs 8 bytes of memory per row.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graft.data.errors import DataError

BOM = b"\xef\xbb\xbf"  # the byte order mark that some editors put before UTF-8
CHUNK = 1 << 20
MAX_ROW = 1 << 26  # bytes of one row; a file with longer ones has another format than its name says
_MARK = re.compile(
    rb'(?:[^"\[\]{},]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+(?:([\[{])|([\]}])|,)', re.DOTALL
)
"""The next bracket (opening, closing) or comma of JSON, and the texts and numbers before it."""


class JsonlFile:
    """One row per line; blank lines are skipped."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def records(self) -> Iterator[tuple[int, bytes]]:
        """The byte at which each row starts, and the row's bytes."""
        at = 0
        with self.file.open("rb") as lines:
            while line := lines.readline(MAX_ROW):
                if len(line) == MAX_ROW and not line.endswith(b"\n"):
                    raise DataError(
                        f"{self.file}, line {line_at(self.file, at)} is longer than {MAX_ROW >> 20} MB; "
                        "is it one row per line? A list of rows is called .json"
                    )
                if line.removeprefix(BOM).strip():  # joined files have a mark in the middle
                    yield at, line
                at += len(line)

    def parse(self, text: bytes) -> dict[str, Any]:
        line = text.removeprefix(BOM).partition(b"\n")[0]  # the rest is blank, or a mark
        return as_row(_loads(line.decode("utf-8")))

    def describe_error(self, start: int, row: int, error: Exception) -> str:
        """What is wrong with the row at byte `start`; the line is counted as an editor counts it."""
        return _json_error(f"line {line_at(self.file, start)}", row, error)


class JsonList:
    """One list of rows over any number of lines."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def records(self) -> Iterator[tuple[int, bytes]]:
        """The byte at which each row starts, and the row's bytes; a row is parsed only by `parse`."""
        depth = row = start = 0
        with self.file.open("rb") as stream:
            begins = stream.read(CHUNK).removeprefix(BOM).lstrip()[:1]
            if begins != b"[":
                raise DataError(
                    f"{self.file} is not JSON in UTF-8: it must be a list of rows, [{{...}}, ...], and "
                    f"begins with {begins.decode(errors='replace')!r}"
                )
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as text:
                for mark in _MARK.finditer(text):
                    kind = mark.lastindex
                    if depth == 1 and kind != 1:
                        piece = text[start : mark.end() - 1]
                        if row or kind is None or piece.strip():  # else the list is empty
                            yield start + len(piece) - len(piece.lstrip()), piece.strip()
                            row += 1
                        start = mark.end()
                    if kind is not None:
                        depth += 1 if kind == 1 else -1
                        if depth == 0:
                            return
                        start = start or mark.end()  # behind the bracket of the list itself
        raise DataError(
            f"{self.file} is not JSON in UTF-8: row {row + 1} does not end; the file may be cut off"
        )

    def parse(self, text: bytes) -> dict[str, Any]:
        decoded = text.decode("utf-8")
        value, end = _DECODER.raw_decode(decoded)
        rest = decoded[end:].lstrip()  # of the list, up to the next row
        if rest and rest[0] not in ",]":
            raise ValueError(f"after it comes {rest[0]!r}, where a comma or ] must stand")
        return as_row(value)

    def describe_error(self, start: int, row: int, error: Exception) -> str:
        return _json_error(f"row {row}", row, error)


class Csv:
    """One row per record; the first names the fields. A field in quotes may hold line breaks.

    Every value is text, an empty one None. A value that is a JSON object or a list of objects is
    parsed, so a chat fits into one value.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        csv.field_size_limit(MAX_ROW)
        found = next(self._records(0), None)
        self.begins = found[0] + len(found[1]) if found else 0
        try:
            head = found[1].removeprefix(BOM).decode("utf-8") if found else ""
        except UnicodeDecodeError as error:
            raise DataError(f"{file}, line 1 is not UTF-8: {_explained(error)}") from error
        self.fields = [name.strip() for name in next(csv.reader(io.StringIO(head, newline="")), [])]
        if len(set(self.fields)) < len(self.fields) or "" in self.fields:
            raise DataError(
                f"{file}: the first line must name every column, each once; it holds "
                f"{', '.join(map(repr, self.fields))}"
            )

    def records(self) -> Iterator[tuple[int, bytes]]:
        """The byte at which each row starts, and the row's bytes."""
        yield from self._records(self.begins)

    def _records(self, at: int) -> Iterator[tuple[int, bytes]]:
        taken: list[bytes] = []

        length = 0

        def lines() -> Iterator[str]:
            nonlocal length
            while line := stream.readline(MAX_ROW):
                taken.append(line)
                length += len(line)
                if length >= MAX_ROW:
                    raise csv.Error(f"a row is longer than {MAX_ROW >> 20} MB")
                # a quote is only a quote as the first character of a field
                text = line if taken[1:] else line.removeprefix(BOM)
                yield text.decode("utf-8", "surrogateescape")  # refused when the row is parsed

        with self.file.open("rb") as stream:
            stream.seek(at)
            reader = csv.reader(lines(), strict=True)
            try:
                for values in reader:
                    text = b"".join(taken)
                    taken.clear()
                    length = 0
                    if values:
                        yield at, text
                    at += len(text)
            except csv.Error as error:
                raise DataError(
                    f"{self.file}, line {line_at(self.file, at)}: no row can be read from here on: "
                    f"{error}; is a quote left open?"
                ) from error

    def parse(self, text: bytes) -> dict[str, Any]:
        text = text.removeprefix(BOM)
        values = next(csv.reader(io.StringIO(text.decode("utf-8"), newline=""), strict=True))
        if len(values) != len(self.fields):
            raise ValueError(f"it has {len(values)} values, and the first line {len(self.fields)}")
        return dict(zip(self.fields, map(_csv_value, values), strict=True))

    def describe_error(self, start: int, row: int, error: Exception) -> str:
        return f"line {line_at(self.file, start)} is no row of csv in UTF-8: {_explained(error)}"


TextRows = JsonlFile | JsonList | Csv


def _csv_value(text: str) -> Any:
    if text.startswith(("{", "[{")):
        try:
            return _loads(text)
        except DuplicateKey:
            raise
        except (ValueError, RecursionError):
            return text
    return text or None


class DuplicateKey(ValueError):
    """An object with two values under one key, of which only the last would be read."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DuplicateKey(f"the key {twice!r} occurs twice in one object; remove one of the two")
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
_loads = _DECODER.decode


class NotAnObject(ValueError):
    """JSON, but no row."""


def _json_error(where: str, row: int, error: Exception) -> str:
    if isinstance(error, NotAnObject):
        return f"row {row} is {error}"
    is_json = isinstance(error, DuplicateKey)
    return f"{where}: {error}" if is_json else f"{where} is not JSON in UTF-8: {_explained(error)}"


def _explained(error: Exception) -> str:
    """An error of a row, and for usual mistakes what to do."""
    if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
        after = error.doc[error.pos :].strip()
        remedy = "remove it" if after.startswith(",") else "give every row a line of its own"
        return f"after its object comes {after[:40]!r}; {remedy}"
    if not isinstance(error, UnicodeDecodeError):
        return str(error)
    is_utf_16 = error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    seems = "; it seems to be UTF-16" if is_utf_16 else ""
    return f"{error}{seems}; save the file as UTF-8"


def as_row(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise NotAnObject(f"{type(value).__name__}, not an object with named fields")
    return value


def line_at(file: Path, start: int) -> int:
    """The line of byte `start`, from 1. Counted only for an error message."""
    with file.open("rb") as stream:
        count, left = 1, start
        while left and (piece := stream.read(min(CHUNK, left))):
            count += piece.count(b"\n")
            left -= len(piece)
    return count


def json_or_jsonl(file: Path) -> JsonlFile | JsonList:
    """The reader of a .json file, which holds a list of rows, or one row per line."""
    with file.open("rb") as stream:
        lines = iter(lambda: stream.readline(MAX_ROW), b"")
        filled = (text for line in lines if (text := line.removeprefix(BOM).strip()))
        first, rest = next(filled, b""), next(filled, b"")
    if first.startswith(b"{") and rest:
        try:
            json.loads(first.decode("utf-8"))
        except (ValueError, RecursionError):
            return JsonList(file)
        return JsonlFile(file)
    return JsonList(file)
