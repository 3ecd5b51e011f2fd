"""Sizes of Arrow data before they are read: a file of a megabyte may stand for gigabytes.

compressed pages      "aaaa..." of 1 GB takes 100 KB            refused by `check_parquet`, `check_ipc`
dictionaries          8 million times one text of 1 KB          kept as dictionaries: `repeated_columns`
runs                  a billion zeros take some bytes           refused: more rows than bytes
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from graft.data.errors import DataError

MAX_DECODED = 1 << 29
"""Bytes of columns that a file may stand for whatever its size: 512 MB."""
MAX_GROWTH = 200
"""Of a larger one: decoded bytes per byte on the disk. Real texts have up to 20."""
MAX_ROWS = 1_000_000
"""Rows that a file may have whatever its size; more must take at least a byte each."""
MAX_REPEATED = 1 << 28
"""Bytes of a column that may be written out, if every value were its longest."""
MAX_ROW = 1 << 28
"""Bytes of one row."""
AT_ONCE = 1 << 26
"""Bytes of a batch that is turned into dicts at once."""


def check_parquet(file: Path, metadata: Any) -> None:
    """Raise DataError for a file that stands for far more than it holds."""
    columns = [
        metadata.row_group(group).column(column)
        for group in range(metadata.num_row_groups)
        for column in range(metadata.row_group(group).num_columns)
    ]
    _check(file, sum(map(_decoded, columns)), metadata.num_rows)


def _decoded(column: Any) -> int:
    """Bytes of a column chunk in memory; of texts in a dictionary only those that are stored."""
    fixed = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}
    width = fixed.get(column.physical_type, 4)  # a text takes an index
    return max(column.total_uncompressed_size, column.num_values * width)


def _check(file: Path, decoded: int, rows: int) -> None:
    size = file.stat().st_size
    if decoded > MAX_DECODED and decoded > MAX_GROWTH * size:
        raise DataError(
            f"{file} has {size:,} bytes and stands for {decoded:,}, more than {MAX_GROWTH} times as many: "
            "it is made to fill the memory, and is not read. A file of your own: write it without compression"
        )
    if rows > MAX_ROWS and rows > size:
        raise DataError(
            f"{file} has {size:,} bytes and {rows:,} rows, more than one per byte: the rows repeat each "
            "other, and it is not read. A file of your own: remove the duplicates"
        )


def repeated_columns(metadata: Any) -> list[str]:
    """Columns of texts that may be much longer than stored: read as dictionaries, they are not."""
    found: dict[str, None] = {}
    for group in range(metadata.num_row_groups):
        chunks = metadata.row_group(group)
        for number in range(chunks.num_columns):
            chunk = chunks.column(number)
            is_listed = any("DICTIONARY" in str(how) for how in chunk.encodings)
            longest = chunk.total_uncompressed_size  # of a value, at most
            is_text = chunk.physical_type == "BYTE_ARRAY"
            if is_text and is_listed and chunk.num_values * longest > MAX_REPEATED:
                found[chunk.path_in_schema] = None
    return list(found)


def written_out(array: Any) -> int:
    """Bytes of an array, batch or table once every value in a dictionary is written out."""
    import pyarrow
    from pyarrow import compute, types

    if isinstance(array, pyarrow.RecordBatch | pyarrow.Table):
        return sum(map(written_out, array.columns))
    if isinstance(array, pyarrow.ChunkedArray):
        return sum(map(written_out, array.chunks))
    kind = array.type
    if isinstance(kind, pyarrow.BaseExtensionType):
        return written_out(array.storage)
    if types.is_dictionary(kind):
        if not (
            types.is_string(kind.value_type)
            or types.is_binary(kind.value_type)
            or types.is_large_string(kind.value_type)
            or types.is_large_binary(kind.value_type)
        ):
            return array.dictionary.nbytes * max(1, len(array))
        lengths = compute.binary_length(array.dictionary)  # type: ignore[attr-defined]
        return compute.sum(lengths.take(array.indices)).as_py() or 0  # type: ignore[attr-defined]
    if types.is_struct(kind):
        return sum(map(written_out, array.flatten()))
    if types.is_map(kind) or not hasattr(array, "flatten") or not types.is_nested(kind):
        return array.nbytes
    return written_out(array.flatten())


def has_dictionary(kind: Any) -> bool:
    return "dictionary<" in str(kind)


def check_ipc(file: Path, memory: Any) -> None:
    """Raise DataError for compressed buffers, which are all decoded at once, that would fill the memory."""
    import pyarrow

    decoded = 0
    try:
        start = 8 if memory.read(6) == b"ARROW1" else 0
        memory.seek(start)
        for message in pyarrow.MessageReader.open_stream(memory):
            decoded += _uncompressed(bytes(message.metadata), message.body)
    except struct.error as error:
        raise DataError(f"{file} is not an Arrow file or stream: {error}") from error
    if decoded > MAX_DECODED:
        raise DataError(
            f"{file} is compressed, and stands for {decoded:,} bytes, which would all be in memory at once; "
            f"at most {MAX_DECODED:,} are read. Write it without compression, which stays on the disk, or "
            "as parquet"
        )
    memory.seek(0)


def _uncompressed(metadata: bytes, body: Any) -> int:
    """Bytes of the buffers of a message, from its flatbuffer: Message -> RecordBatch -> buffers."""

    def number(kind: str, at: int) -> int:
        return struct.unpack_from(f"<{kind}", metadata, at)[0]

    def entry(table: int, place: int) -> int:
        """The position of a table's entry; 0: it has none."""
        lookup = table - number("i", table)
        has = 4 + 2 * place < number("H", lookup)
        offset = number("H", lookup + 4 + 2 * place) if has else 0
        return table + offset if offset else 0

    def followed(at: int) -> int:
        return at + number("I", at)

    message = number("I", 0)
    kind, header = entry(message, 1), entry(message, 2)
    if not kind or not header:
        return 0
    table = followed(header)
    match number("B", kind):
        case 2:  # a dictionary: its data are a record batch
            if not entry(table, 1):
                return 0
            table = followed(entry(table, 1))
        case 3:
            pass
        case _:
            return 0
    if not entry(table, 2) or not entry(
        table, 3
    ):  # no buffers, or no compression: as large as the file
        return 0
    buffers, total = followed(entry(table, 2)), 0
    for place in range(number("I", buffers)):
        offset, length = (number("q", buffers + 4 + 16 * place + 8 * n) for n in (0, 1))
        if length >= 8:
            total += max(length, struct.unpack("<q", bytes(body[offset : offset + 8]))[0])
    return total
