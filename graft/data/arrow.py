"""Rows in Arrow's two formats: parquet, and IPC as `datasets` saves it (a file or a stream).

Small parquet files are one table in memory. Of a large one only the row groups that were asked for
last are, and an IPC file is mapped, so that the system keeps as much of it as there is room for.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from graft.data.arrow_values import trajectories_of
from graft.data.errors import DataError

IN_MEMORY = 1 << 28  # bytes of uncompressed columns that are kept: 256 MB
BATCH = 256  # rows that are turned into dicts at a time


class ParquetRows:
    """One file, in order, a batch at a time; places are numbers of rows."""

    kind = "parquet"

    def __init__(self, file: Path) -> None:
        self.file = file

    def read(self, at: int = 0) -> Iterator[tuple[int, Any]]:
        """Where the next row starts, and the row or the DataError it is, from row `at` on."""
        import pyarrow

        done = at
        try:
            with opened(self.file) as table:
                first = 0
                for group in range(table.num_row_groups):
                    size = table.metadata.row_group(group).num_rows
                    skipped = min(max(at - first, 0), size)
                    first += size
                    if skipped == size:
                        continue
                    for batch in table.iter_batches(BATCH, row_groups=[group], use_threads=False):
                        left = batch.slice(min(skipped, len(batch)))
                        skipped -= len(batch) - len(left)
                        for row in trajectories_of(left, self.file, done):
                            done += 1
                            yield done, row
        except (pyarrow.ArrowException, OSError) as error:
            raise unreadable(self.file, error, done) from error


class ArrowRows:
    """One IPC file or stream, in order; places are numbers of rows."""

    kind = "arrow"

    def __init__(self, file: Path) -> None:
        self.file = file

    def read(self, at: int = 0) -> Iterator[tuple[int, Any]]:
        table, done = mapped(self.file), at
        for batch in table.slice(at).to_batches(max_chunksize=BATCH):
            for row in trajectories_of(batch, self.file, done):
                done += 1
                yield done, row


class Groups(Sequence[dict[str, Any]]):
    """The rows of parquet files by number; the row groups that were used last stay in memory.

    groups of 1000 and 500 rows: row 1200 is number 200 of the second
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files
        self.groups: list[tuple[Path, int]] = []
        sizes: list[int] = []
        schemas: list[Any] = []
        for file in files:
            with opened(file) as table:
                schemas.append(table.schema_arrow)
                for group in range(table.num_row_groups):
                    self.groups.append((file, group))
                    sizes.append(table.metadata.row_group(group).num_rows)
        self.column_names: list[str] = one_schema(schemas, files).names
        self.ends = list(accumulate(sizes))
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, number: Any) -> Any:
        index = bisect_right(self.ends, number)
        group = self._group(index)
        place = number - (self.ends[index] - len(group))
        row = next(trajectories_of(group.slice(place, 1), self.groups[index][0], number))
        # a column that other files have is there in every row
        return row if isinstance(row, DataError) else {**dict.fromkeys(self.column_names), **row}

    def _group(self, index: int) -> Any:
        import pyarrow

        with self._lock:
            if index not in self._kept:
                file, number = self.groups[index]
                try:
                    with opened(file) as table:
                        found = table.read_row_group(number, use_threads=False)
                except (pyarrow.ArrowException, OSError) as error:
                    raise unreadable(file, error, self.ends[index]) from error
                size = found.nbytes
                while self._kept and size + sum(g.nbytes for g in self._kept.values()) > IN_MEMORY:
                    self._kept.popitem(last=False)
                self._kept[index] = found
            self._kept.move_to_end(index)
            return self._kept[index]


def parquet_rows(files: Sequence[Path]) -> Any:
    """All rows of these files: as one Arrow table, or as `Groups` where that would be too large."""
    import pyarrow

    size = 0
    for file in files:
        with opened(file) as table:
            groups = range(table.num_row_groups)
            size += sum(table.metadata.row_group(group).total_byte_size for group in groups)
    if size > IN_MEMORY:
        return Groups(files)
    tables: list[Any] = []
    for file in files:
        try:
            with opened(file) as table:  # one file each: a folder called x=1 is no column
                tables.append(table.read())
        except (pyarrow.ArrowException, OSError) as error:
            raise unreadable(file, error) from error
    return together(tables, files)


def arrow_rows(files: Sequence[Path]) -> Any:
    return together([mapped(file) for file in files], files)


def together(tables: Sequence[Any], files: Sequence[Path]) -> Any:
    import pyarrow

    one_schema([table.schema for table in tables], files)
    return pyarrow.concat_tables(tables, promote_options="default")


def one_schema(schemas: Sequence[Any], files: Sequence[Path]) -> Any:
    import pyarrow

    try:
        return pyarrow.unify_schemas(schemas)
    except pyarrow.ArrowException as error:
        names = ", ".join(file.name for file in files)
        raise DataError(f"the columns of {names} are not of one type: {error}") from error


def opened(file: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file, buffer_size=1 << 20)
    except (pyarrow.ArrowException, OSError) as error:
        raise unreadable(file, error) from error


def mapped(file: Path) -> Any:
    """An IPC file or stream as a table whose columns stay on the disk until they are used."""
    import pyarrow

    try:
        memory = pyarrow.memory_map(str(file))
        try:
            return pyarrow.ipc.open_file(memory).read_all()
        except pyarrow.ArrowInvalid:
            memory.seek(0)
            return pyarrow.ipc.open_stream(memory).read_all()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{file} is not an Arrow file or stream: {error}; it may be cut off: compare its size "
            "with the original's"
        ) from error


def unreadable(file: Path, error: Exception, done: int = 0) -> DataError:
    at = f" from row {done + 1} on" if done else ""
    what = f"cannot be read{at}" if at else "is not a parquet file"
    return DataError(
        f"{file} {what}: {str(error).strip()}; it may be cut off: compare its size with the original's"
    )


def batches(table: Any, source: str) -> Iterator[Any]:
    """The rows of a table in memory, a batch at a time."""
    done = 0
    for batch in table.to_batches(max_chunksize=BATCH):
        yield from trajectories_of(batch, source, done)
        done += len(batch)
