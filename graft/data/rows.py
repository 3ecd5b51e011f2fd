"""Rows from files people have, one after the other: jsonl, json or parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from graft.data.conversations import chat_of
from graft.types import Message

ENDINGS = (".parquet", ".jsonl", ".json")
_MARK = b"\xef\xbb\xbf"  # what some editors put before UTF-8


class DataError(ValueError):
    """A file or row that cannot be used; the text names the row, the field and why."""


def read_chats(path: str) -> list[list[Message]]:
    """The chat of every row, as lists of {role, content} with an assistant turn to learn.

    Rows hold `messages`, ShareGPT's `conversations` or Alpaca's columns, see `graft.data.conversations`.
    """
    chats = [_chat(row, f"{path}, row {number}") for number, row in enumerate(read_rows(path), 1)]
    if not chats:
        raise DataError(f"{path} has no rows")
    return chats


def read_rows(path: str) -> Iterator[dict[str, Any]]:
    """Rows as dicts; the format is the file's ending."""
    file = Path(path)
    if not file.is_file():
        raise DataError(f"no file {path!r}")
    match ending_of(file):
        case ".parquet":
            yield from _parquet(file)
        case ".jsonl":
            yield from (row for _, row in json_lines(file))
        case _:
            yield from json_rows(file)


def ending_of(file: Path) -> str:
    ending = file.suffix.lower()
    if ending not in ENDINGS:
        raise DataError(f"{file} ends in {file.suffix!r}; readable are .jsonl, .json and .parquet")
    return ending


def arrow_table(files: Sequence[Path]) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        # one file each: read_table would take a folder called x=1 for a column
        tables = [pyarrow.parquet.ParquetFile(file).read() for file in files]
        return pyarrow.concat_tables(tables, promote_options="default")
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{files[0]} is not a parquet file: {error}") from error
    except pyarrow.ArrowTypeError as error:
        names = ", ".join(file.name for file in files)
        raise DataError(f"the columns of {names} are not of one type: {error}") from error


def json_lines(file: Path) -> Iterator[tuple[bytes, Any]]:
    """Every line that is not blank, as it stands and parsed."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            line = line.removeprefix(_MARK).strip()
            if line:
                yield line, _parse(line, f"{file}, line {number}")


def json_rows(file: Path) -> Iterator[Any]:
    text = file.read_bytes().removeprefix(_MARK).strip()
    if b"\n" in text and text.startswith(b"{") and _is_json(text.partition(b"\n")[0]):
        yield from (row for _, row in json_lines(file))  # a jsonl file by another name
        return
    rows = _parse(text, str(file))
    if not isinstance(rows, list):
        raise DataError(f"{file} holds {type(rows).__name__}, not a list of rows: [{{...}}, ...]")
    yield from rows


def _parse(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # nested too deeply, a number of 5000 digits ...
        raise DataError(f"{where} is not JSON in UTF-8: {error}") from error


def _is_json(text: bytes) -> bool:
    try:
        _parse(text, "")
    except DataError:
        return False
    return True


def _parquet(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for part in table.iter_batches():
                yield from part.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file} is not a parquet file: {error}") from error


def _chat(row: Any, where: str) -> list[Message]:
    if not isinstance(row, dict):
        raise DataError(f"{where} is {type(row).__name__}, not an object with named fields")
    try:
        return chat_of(row)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
