"""Rows in Arrow's two formats: parquet, and IPC as `datasets` saves it (a file or a stream).

A small parquet file is one table in memory. Of a large one only the row groups that were used last
are kept, and an IPC file is memory-mapped, so the system keeps as much of it as memory allows.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from graft.data.arrow_bounds import check_ipc, check_parquet, repeated_columns
from graft.data.arrow_values import plain_rows
from graft.data.errors import DataError

IN_MEMORY = 1 << 28  # bytes of uncompressed columns that are kept: 256 MB
CUT_OFF = "it may be cut off: compare its size with the original's"
BATCH = 256  # rows that are turned into dicts at a time


def scan_parquet(file: Path) -> Iterator[Any]:
    """Every row of one parquet file in order, or the DataError about it; one row group is in memory."""
    done = 0
    with open_parquet(file, lambda: done) as table:
        for group in range(table.num_row_groups):
            for batch in table.iter_batches(BATCH, row_groups=[group], use_threads=False):
                for row in plain_rows(batch, file, done):
                    done += 1
                    yield row


class RowGroups(Sequence[dict[str, Any]]):
    """The rows of parquet files by number; the row groups that were used last stay in memory.

    groups of 1000 and 500 rows: row 1200 is number 200 of the second
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files
        self.groups: list[tuple[Path, int]] = []
        sizes: list[int] = []
        schemas: list[Any] = []
        for file in files:
            with open_parquet(file) as table:
                schemas.append(table.schema_arrow)
                for group in range(table.num_row_groups):
                    self.groups.append((file, group))
                    sizes.append(table.metadata.row_group(group).num_rows)
        self.column_names: list[str] = unify(schemas, files).names
        self.ends = list(accumulate(sizes))
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, number: Any) -> Any:
        index = bisect_right(self.ends, number)
        group = self._group(index)
        offset = number - (self.ends[index] - len(group))
        row = next(plain_rows(group.slice(offset, 1), self.groups[index][0], number))
        # a column of any of the files is present in every row
        return row if isinstance(row, DataError) else {**dict.fromkeys(self.column_names), **row}

    def _group(self, index: int) -> Any:
        with self._lock:
            if index not in self._kept:
                file, number = self.groups[index]
                with open_parquet(file, lambda: self.ends[index]) as table:
                    found = table.read_row_group(number, use_threads=False)
                size = found.nbytes
                while self._kept and size + sum(g.nbytes for g in self._kept.values()) > IN_MEMORY:
                    self._kept.popitem(last=False)
                self._kept[index] = found
            self._kept.move_to_end(index)
            return self._kept[index]


def parquet_rows(files: Sequence[Path]) -> Any:
    """All rows of these files: as one Arrow table, or as `RowGroups` where that would be too large."""
    size = 0
    for file in files:
        with open_parquet(file) as table:
            groups = range(table.num_row_groups)
            for group in groups:
                found = table.metadata.row_group(group)
                size += max(found.total_byte_size, 8 * found.num_rows * found.num_columns)
    if size > IN_MEMORY:
        return RowGroups(files)
    tables: list[Any] = []
    for file in files:  # one at a time: a folder called x=1 is no column
        with open_parquet(file) as table:
            tables.append(table.read())
    return concat(tables, files)


def arrow_rows(files: Sequence[Path]) -> Any:
    return concat([map_arrow(file) for file in files], files)


def concat(tables: Sequence[Any], files: Sequence[Path]) -> Any:
    import pyarrow

    unify([table.schema for table in tables], files)  # names the files if their types differ
    return pyarrow.concat_tables(tables, promote_options="default")


def unify(schemas: Sequence[Any], files: Sequence[Path]) -> Any:
    import pyarrow

    try:
        return pyarrow.unify_schemas(schemas)
    except pyarrow.ArrowException as error:
        names = ", ".join(file.name for file in files)
        raise DataError(f"the columns of {names} are not of one type: {error}") from error


@contextmanager
def open_parquet(file: Path, done: Callable[[], int] = lambda: 0) -> Iterator[Any]:
    """A parquet file; an error in the block names the file, and the row after the `done` ones."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            metadata = table.metadata
            check_parquet(file, metadata)
            repeated = repeated_columns(metadata)
        with pyarrow.parquet.ParquetFile(
            file, buffer_size=1 << 20, read_dictionary=repeated
        ) as table:
            yield table
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        what = f"cannot be read from row {done() + 1} on" if done() else "is not a parquet file"
        raise DataError(f"{file} {what}: {str(error).strip()}; {_way_out(file)}") from error


def _way_out(file: Path) -> str:
    """What to do about a file that is not what its ending says."""
    try:
        with file.open("rb") as opened:
            start = opened.read(64).lstrip()
    except OSError:
        return CUT_OFF
    if start.startswith((b"{", b"[")):
        return "it begins as JSON does: rename it to .jsonl"
    if b"git-lfs" in start:
        return "it is a pointer of Git LFS: `git lfs pull` gets the file itself"
    return CUT_OFF


def map_arrow(file: Path) -> Any:
    """An IPC file or stream as a table whose columns stay on the disk until they are used."""
    import pyarrow

    try:
        memory = pyarrow.memory_map(str(file))
        check_ipc(file, memory)
        try:
            return pyarrow.ipc.open_file(memory).read_all()
        except pyarrow.ArrowInvalid:
            memory.seek(0)
            return pyarrow.ipc.open_stream(memory).read_all()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{file} is not an Arrow file or stream: {error}; {_way_out(file)}"
        ) from error


def table_rows(table: Any, source: str) -> Iterator[Any]:
    """Every row of an Arrow table, converted a batch at a time, or the DataError about it."""
    done = 0
    for batch in table.to_batches(max_chunksize=BATCH):
        yield from plain_rows(batch, source, done)
        done += len(batch)
