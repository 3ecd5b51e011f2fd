r"""Where the rows of a text file lie: jsonl, json and csv, found without keeping the file in memory.

    {"a": 1}\n\n{"a": 2}\n        jsonl: rows start at bytes 0 and 10
    [{"a": 1}, {"a": 2}]          json:  at 1 and 11
    a,b\n1,"x\ny"\n2,z\n          csv:   at 4 and 12; the header names the fields of all of them

A row reaches to where the next one starts; what stands between the two (a comma, blank lines) is
passed over when it is parsed. So one number of 8 bytes is all that a row costs until it is asked for.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graft.data.errors import DataError

MARK = b"\xef\xbb\xbf"  # what some editors put before UTF-8
CHUNK = 1 << 20
MOST = 1 << 26  # bytes of one row; a file with longer ones is something else than it says
_BLANK = re.compile(r"[ \t\r\n]*")


class JsonlFile:
    """One row per line; blank lines are none."""

    kind = "jsonl"

    def __init__(self, file: Path) -> None:
        self.file = file

    def places(self, at: int = 0) -> Iterator[tuple[int, bytes]]:
        """Where each row starts, and its bytes, from byte `at` on, which is the start of a line."""
        with self.file.open("rb") as lines:
            lines.seek(at)
            while line := lines.readline(MOST):
                if len(line) == MOST and not line.endswith(b"\n"):
                    raise DataError(
                        f"{self.file}, line {self.line_of(at)} is longer than {MOST >> 20} MB; is it "
                        "one row per line? A list of rows is called .json"
                    )
                if line.removeprefix(MARK).strip():  # files put together have a mark within
                    yield at, line
                at += len(line)

    def parse(self, text: bytes) -> dict[str, Any]:
        line = text.removeprefix(MARK).partition(b"\n")[0]  # what follows is blank, or a mark
        return an_object(_loads(line.decode("utf-8")))

    def complaint(self, start: int, row: int, error: Exception) -> str:
        """What is wrong with the row at byte `start`, with its place as an editor counts it."""
        if isinstance(error, NotAnObject):
            return f"row {row} is {error}"
        if isinstance(error, TwoOfOneName):
            return f"line {self.line_of(start)}: {error}"
        return f"line {self.line_of(start)} is not JSON in UTF-8: {error}"

    def line_of(self, start: int) -> int:
        """The line that byte `start` is on. Counted only when something is wrong there."""
        return line_at(self.file, start)


class JsonList:
    """One list of rows over as many lines as it likes, read a piece at a time."""

    kind = "json"

    def __init__(self, file: Path) -> None:
        self.file = file

    def places(self, at: int = 0) -> Iterator[tuple[int, bytes]]:
        """From byte `at` on: 0, or where a row ended."""
        parse = json.JSONDecoder().raw_decode
        row = 0
        with self.file.open("rb") as stream:
            window = _Window(stream, self.file, at)
            if at == 0:
                if (first := window.next_character()) != "[":
                    self._refuse(first)
                window.take(1)
                if window.next_character() == "]":
                    return
            elif window.next_character() == ",":
                window.take(1)
            elif window.next_character() == "]":
                return
            while True:
                window.next_character()
                while True:  # a row may go on behind what has been read so far
                    try:
                        _, end = parse(window.text, window.at)
                        if end < len(window.text) or window.is_last:
                            break
                    except (ValueError, RecursionError) as error:
                        if window.is_last or window.ahead > MOST or "recursion" in str(error):
                            where = f"{self.file}, row {row + 1}" if row or at else str(self.file)
                            cut = "; the file may be cut off" if window.is_last else ""
                            raise DataError(
                                f"{where} is not JSON in UTF-8: {error}{cut}"
                            ) from error
                    window.grow()
                start = window.byte
                yield start, window.take(end - window.at)
                row += 1
                found = window.next_character()
                if found == "]":
                    return
                if found != ",":
                    seen = f"{found!r}" if found else "its end; the file may be cut off"
                    raise DataError(
                        f"{self.file} is not JSON in UTF-8: after row {row} comes {seen}, where a "
                        "comma or ] must stand"
                    )
                window.take(1)

    def _refuse(self, first: str) -> None:
        """Say what a file holds that is no list."""
        try:
            with self.file.open("rb") as stream:
                found = json.loads(stream.read(MOST).removeprefix(MARK).decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.file} is not JSON in UTF-8: {error}") from error
        raise DataError(
            f"{self.file} holds {type(found).__name__}, not a list of rows: [{{...}}, ...]"
        )

    def parse(self, text: bytes) -> dict[str, Any]:
        # up to where the next row starts there is a comma, or the end of the list
        return an_object(_DECODER.raw_decode(text.decode("utf-8"))[0])

    def complaint(self, start: int, row: int, error: Exception) -> str:
        return f"row {row}: {error}" if isinstance(error, TwoOfOneName) else f"row {row} is {error}"


class _Window:
    """A piece of a long text: `at` is where we are in it, `byte` the same place in the file."""

    def __init__(self, stream: Any, file: Path, at: int) -> None:
        self.stream, self.file, self.byte = stream, file, at
        stream.seek(at)
        if at == 0 and stream.read(len(MARK)) == MARK:
            self.byte = len(MARK)
        stream.seek(self.byte)
        self.decode = codecs.getincrementaldecoder("utf-8")().decode
        self.text, self.at, self.is_last = "", 0, False

    @property
    def ahead(self) -> int:
        return len(self.text) - self.at

    def grow(self) -> None:
        """Read on, twice as much each time for a row that is longer than what is there."""
        piece = self.stream.read(max(CHUNK, self.ahead))
        self.is_last = not piece
        try:
            self.text = self.text[self.at :] + self.decode(piece, self.is_last)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.file} is not JSON in UTF-8: {error}, a little after byte {self.byte}"
            ) from error
        self.at = 0

    def take(self, count: int) -> bytes:
        """The next `count` characters as the file has them; go behind them."""
        taken = self.text[self.at : self.at + count].encode("utf-8")
        self.at += count
        self.byte += len(taken)
        return taken

    def next_character(self) -> str:
        """Pass over blanks; what follows them, "" at the end of the file."""
        while True:
            match = _BLANK.match(self.text, self.at)
            self.take((match.end() if match else self.at) - self.at)
            if self.ahead:
                return self.text[self.at]
            if self.is_last:
                return ""
            self.grow()


class Csv:
    """One row per record; the first names the fields. A field in quotes may hold line breaks.

    Every value is text, an empty one None. One that is a JSON object or a list of objects is that: a
    chat fits into a cell.
    """

    kind = "csv"

    def __init__(self, file: Path) -> None:
        self.file = file
        csv.field_size_limit(MOST)
        found = next(self._records(0), None)
        self.begins = found[0] + len(found[1]) if found else 0
        try:
            head = found[1].removeprefix(MARK).decode("utf-8") if found else ""
        except UnicodeDecodeError as error:
            raise DataError(f"{file}, line 1 is not UTF-8: {error}") from error
        self.fields = [name.strip() for name in next(csv.reader(io.StringIO(head, newline="")), [])]
        if len(set(self.fields)) < len(self.fields) or "" in self.fields:
            raise DataError(
                f"{file}: the first line must name every column, each once; it holds "
                f"{', '.join(map(repr, self.fields))}"
            )

    def places(self, at: int = 0) -> Iterator[tuple[int, bytes]]:
        yield from self._records(at or self.begins)

    def _records(self, at: int) -> Iterator[tuple[int, bytes]]:
        taken: list[bytes] = []

        def lines() -> Iterator[str]:
            while line := stream.readline(MOST):
                taken.append(line)
                text = (
                    line if taken[1:] else line.removeprefix(MARK)
                )  # or a quote would not be first
                yield text.decode("utf-8", "surrogateescape")  # refused when the row is parsed

        with self.file.open("rb") as stream:
            stream.seek(at)
            reader = csv.reader(lines(), strict=True)
            try:
                for cells in reader:
                    text = b"".join(taken)
                    taken.clear()
                    if cells:
                        yield at, text
                    at += len(text)
            except csv.Error as error:
                raise DataError(
                    f"{self.file}, line {line_at(self.file, at)}: no row can be read from here on: "
                    f"{error}; is a quote left open?"
                ) from error

    def parse(self, text: bytes) -> dict[str, Any]:
        text = text.removeprefix(MARK)
        cells = next(csv.reader(io.StringIO(text.decode("utf-8"), newline=""), strict=True))
        if len(cells) != len(self.fields):
            raise ValueError(f"it has {len(cells)} values, and the first line {len(self.fields)}")
        return dict(zip(self.fields, map(_cell, cells), strict=True))

    def complaint(self, start: int, row: int, error: Exception) -> str:
        return f"line {line_at(self.file, start)} is no row of csv in UTF-8: {error}"


TextRows = JsonlFile | JsonList | Csv


def _cell(text: str) -> Any:
    if text.startswith(("{", "[{")):
        try:
            return _loads(text)
        except TwoOfOneName:
            raise
        except (ValueError, RecursionError):
            return text
    return text or None


class TwoOfOneName(ValueError):
    """An object that says two things under one name, of which only the last would be seen."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise TwoOfOneName(f"the name {twice!r} stands in it twice; leave one of the two out")
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
_loads = _DECODER.decode


class NotAnObject(ValueError):
    """JSON, but no row."""


def an_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise NotAnObject(f"{type(value).__name__}, not an object with named fields")
    return value


def line_at(file: Path, start: int) -> int:
    with file.open("rb") as stream:
        count, left = 1, start
        while left and (piece := stream.read(min(CHUNK, left))):
            count += piece.count(b"\n")
            left -= len(piece)
    return count


def lines_or_list(file: Path) -> JsonlFile | JsonList:
    """What a .json file is: a list of rows, or jsonl by another name."""
    with file.open("rb") as stream:
        lines = iter(lambda: stream.readline(MOST), b"")
        filled = (text for line in lines if (text := line.removeprefix(MARK).strip()))
        first, rest = next(filled, b""), next(filled, b"")
    if first.startswith(b"{") and rest:
        try:
            json.loads(first.decode("utf-8"))
        except (ValueError, RecursionError):
            return JsonList(file)
        return JsonlFile(file)
    return JsonList(file)
