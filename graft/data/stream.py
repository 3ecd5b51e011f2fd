"""Rows in order, from files of any size, and a cursor that goes on exactly where it stopped.

    stream = Stream([Path("a.jsonl"), Path("b.jsonl")])
    next(stream)                      the first row of a.jsonl
    state = stream.state()            {"file": 0, "at": 31, "number": 1, "row": 1, "sizes": [62, 80]}
    Stream(files, state)              goes on with the second row, without reading the first again

`at` is a place in the file: bytes of text, or a number of rows in parquet and arrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from graft.data.errors import DataError
from graft.data.rows import rows_in


class Stream(Iterator[dict[str, Any]]):
    """The rows of some files, one file after the other.

    A row that cannot be read stops it with a DataError, and the next call goes on behind that row:
    whoever skips bad rows catches it and counts.
    """

    def __init__(self, files: Sequence[Path], state: Mapping[str, Any] | None = None) -> None:
        self.files = list(files)
        self.sizes = [file.stat().st_size for file in self.files]
        self.file, self.at, self.number, self.row = 0, 0, 0, 0
        """The file, the place in it, rows read of it, rows read of all."""
        if state is not None:
            if list(state["sizes"]) != self.sizes:
                names = ", ".join(map(str, self.files))
                raise DataError(
                    f"{names}: the files had {state['sizes']} bytes when row {state['row']} was read "
                    f"and have {self.sizes} now; going on would mix rows up. Put the old files back, or "
                    "start from the first row"
                )
            self.file, self.at = int(state["file"]), int(state["at"])
            self.number, self.row = int(state["number"]), int(state["row"])
        self._rows: Iterator[tuple[int, Any]] | None = None

    def state(self) -> dict[str, Any]:
        """The cursor, in plain data: behind the row that was read last."""
        return {
            "file": self.file,
            "at": self.at,
            "number": self.number,
            "row": self.row,
            "sizes": self.sizes,
        }

    def __next__(self) -> dict[str, Any]:
        while self.file < len(self.files):
            if self._rows is None:
                self._rows = rows_in(self.files[self.file], self.at, self.number)
            found = next(self._rows, None)
            if found is None:
                self.file, self.at, self.number, self._rows = self.file + 1, 0, 0, None
                continue
            self.at, row = found
            self.number += 1
            self.row += 1
            if isinstance(row, DataError):
                raise row
            return row
        raise StopIteration
