"""Write rows to a jsonl or parquet file that appears under its name when it is complete.

.rows.jsonl.partial    grows, a few thousand rows in memory at most
rows.jsonl             replaces an older file when the last row is written
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from graft.config import ConfigError
from graft.data.errors import DataError
from graft.files import free_megabytes, new_file, sync
from graft.train.errors import RunStopped
from graft.trust.masking import mask_values

ENDINGS = (".jsonl", ".parquet")
ROWS_IN_MEMORY = 4096
Row = dict[str, Any]


@contextmanager
def new_rows(path: Path) -> Iterator[JsonFile | ParquetFile]:
    """A file to `append` rows to; it takes its name when the block ends without an error."""
    check_place(path)
    kind = ParquetFile if path.suffix.lower() == ".parquet" else JsonFile
    with new_file(path) as aside:
        with room_for(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = kind(aside, path)
        try:
            yield file
            with room_for(path):
                file.close()
                sync(aside)
        except BaseException:
            with suppress(OSError):
                file.abandon()
            raise
    sync(path.parent)


def check_place(path: Path) -> None:
    """Refuse a name that rows cannot be written to."""
    if path.suffix.lower() not in ENDINGS:
        raise ConfigError(f"--out {path} ends in {path.suffix!r}; write .jsonl or .parquet")
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder; name a file in it")


@contextmanager
def room_for(path: Path, kept: str = "") -> Iterator[None]:
    """Explain a failed write: free space, and that nothing is lost."""
    try:
        yield
    except OSError as error:
        before = "the older file of that name is unchanged" if path.exists() else "no file is left"
        raise RunStopped(
            f"cannot write {path} ({error}); {free_megabytes(path):,.0f} MB are free there, and "
            f"{kept or before}. Free some space and run the same command again, or give another --out"
        ) from error


class JsonFile:
    """One row per line."""

    def __init__(self, part: Path, path: Path) -> None:
        self.path = path
        self._file: IO[str] = part.open("w", encoding="utf-8", errors="replace")

    def append(self, row: Row) -> None:
        line = mask_values(json.dumps(row, ensure_ascii=False, allow_nan=False))
        with room_for(self.path):
            self._file.write(f"{line}\n")

    def close(self) -> None:
        self._file.close()

    abandon = close


class ParquetFile:
    """Columns as the first rows have them; a few thousand rows are a group."""

    def __init__(self, part: Path, path: Path) -> None:
        self.path = path
        self.written = 0
        self._rows: list[Row] = []
        self._sink: IO[bytes] = part.open("wb")
        self._writer: Any = None
        self._schema: Any = None

    def append(self, row: Row) -> None:
        self._rows.append(flat(row))
        if len(self._rows) == ROWS_IN_MEMORY:
            with room_for(self.path):
                self._write()

    def close(self) -> None:
        if self._rows:
            self._write()
        if self._writer is not None:
            self._writer.close()
        self._sink.close()

    def abandon(self) -> None:
        if self._writer is not None:
            with suppress(Exception):  # closing writes a footer, for which there may be no space
                self._writer.close()
        self._sink.close()

    def _write(self) -> None:
        import pyarrow
        import pyarrow.parquet

        try:
            if self._writer is None:
                self._schema = columns_of(self._rows)
                self._writer = pyarrow.parquet.ParquetWriter(self._sink, self._schema)
            check_keys(self._rows, self._schema.names)
            table = pyarrow.Table.from_pylist(self._rows, schema=self._schema)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, KeyError) as error:
            first, last = self.written + 1, self.written + len(self._rows)
            raise DataError(
                f"rows {first} to {last} do not fit into the columns of one parquet file: {error}. "
                "Write .jsonl, where every row has its own form"
            ) from error
        self._writer.write_table(table)
        self.written += len(self._rows)
        self._rows = []


def flat(row: Row) -> Row:
    """A row for columns: values whose form differs between rows become JSON text."""
    if "tools" not in row:
        return row
    return {**row, "tools": json.dumps(row["tools"], ensure_ascii=False)}


def columns_of(rows: list[Row]) -> Any:
    """The schema of these rows. Chats get all their keys, also those without a value so far."""
    import pyarrow as pa

    text = pa.string()
    messages = pa.list_(pa.struct([("role", text), ("content", text)]))
    call = pa.struct([("tool", text), ("arguments", pa.list_(text))])
    span = [("author", text), ("text", text), ("role", text), ("end", pa.bool_()), ("call", call)]
    known = {
        "messages": messages,
        "prompt": messages,
        "spans": pa.list_(pa.struct(span)),
        "tools": text,
    }
    names = list(dict.fromkeys(key for row in rows for key in row))
    guessed = {name: pa.array([row.get(name) for row in rows]).type for name in names}
    return pa.schema([(name, known.get(name) or guessed[name]) for name in names])


def check_keys(rows: list[Row], columns: list[str]) -> None:
    """Arrow silently drops values without a column."""
    for row in rows:
        messages = [*(row.get("messages") or []), *(row.get("prompt") or [])]
        lost = {*row} - {*columns} | {key for one in messages for key in one} - {"role", "content"}
        if lost:
            raise KeyError(f"no column for {', '.join(sorted(lost))}")
