"""JSON objects of files that another process is writing: a line counts once its newline is written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from graft.files import parse_object
from graft.trust.bounds import is_endless

CHUNK = 1 << 20
"""Bytes read at a time."""
MAX_LINE = 1 << 23
"""Bytes of a line that is read from the end of a file: a step's metrics have some thousand."""
MAX_REST = 1 << 26
"""Bytes of a line that is read forwards: a longer one has no end, and ends the reading."""
MARK = 64
"""Bytes before the place that was read up to; if they differ, the file was rewritten."""


class GrowingJsonl:
    """The JSON objects of a file that grows, each handed out once.

    a file `{"step": 1}⏎{"st`   new() -> {"step": 1}      the half line waits for its end
    then    `ep": 2}⏎` comes    new() -> {"step": 2}
    the file is cut to line 1   new() -> {"step": 1}      and `rewritten` was 1 higher before it
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rewritten = 0
        self._at = 0
        self._mark = b""

    def new(self) -> Iterator[dict[str, Any]]:
        """The objects added since the last call; lines without an object are left out.

        `rewritten` is up to date before the first object is returned.
        """
        try:
            file = open_file(self.path)
        except OSError:  # not there yet, or no longer
            if self._at:
                self._start_over()
            return iter(())
        if self._at and not self._is_as_before(file):
            self._start_over()
        return self._read(file)

    def _read(self, file: IO[bytes]) -> Iterator[dict[str, Any]]:
        with file:
            file.seek(self._at)
            rest: list[bytes] = []
            while chunk := file.read(CHUNK):
                whole, newline, tail = chunk.rpartition(b"\n")
                if not newline:  # a line longer than the chunk: its end is further on
                    rest.append(chunk)
                    if len(rest) * CHUNK > MAX_REST:
                        return
                    continue
                lines = b"".join((*rest, whole, newline))
                rest = [tail]
                self._at += len(lines)
                self._mark = lines[-MARK:]
                for line in lines.split(b"\n"):
                    if line and (row := parse_object(line)) is not None:
                        yield row

    def _is_as_before(self, file: IO[bytes]) -> bool:
        file.seek(self._at - len(self._mark))
        return file.read(len(self._mark)) == self._mark

    def _start_over(self) -> None:
        self._at, self._mark = 0, b""
        self.rewritten += 1


def open_file(path: Path) -> IO[bytes]:
    """OSError also for a device or a pipe, which a folder of a stranger may have under any name."""
    if is_endless(path):
        raise OSError(f"'{path}' is not a file")
    return path.open("rb")


def lines_from_the_end(path: Path) -> Iterator[bytes]:
    """Whole lines of a file, the last one first; an unfinished line is left out."""
    try:
        file = open_file(path)
    except OSError:
        return
    with file:
        start = file.seek(0, os.SEEK_END)
        head = b""  # of a line whose beginning was not read yet
        is_whole = False
        while start:
            length = min(1 << 16, start)
            start -= length
            file.seek(start)
            if len(head) > MAX_LINE:  # joined again for every piece, it would take hours
                return
            head, *lines = (file.read(length) + head).split(b"\n")
            for line in reversed(lines):
                if is_whole and line:
                    yield line
                is_whole = True
        if is_whole and head:
            yield head
