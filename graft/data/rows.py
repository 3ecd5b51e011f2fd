"""Rows from files people have, one after the other: parquet, jsonl, json, csv or arrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graft.data.arrow import ArrowRows, ParquetRows
from graft.data.conversations import chat_of
from graft.data.errors import DataError
from graft.data.records import Csv, JsonlFile, TextRows, lines_or_list
from graft.types import Message

__all__ = ["ENDINGS", "DataError", "ending_of", "read_chats", "read_rows", "rows_in"]

ENDINGS = (".parquet", ".jsonl", ".json", ".csv", ".arrow")


def read_chats(path: str) -> list[list[Message]]:
    """The chat of every row, as lists of {role, content} with an assistant turn to learn.

    Rows hold `messages`, ShareGPT's `conversations` or Alpaca's columns, see `graft.data.conversations`.
    All of them in memory; `graft.data.chats.open_chats` reads more layouts and leaves them in the file.
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
    for _, row in rows_in(file):
        if isinstance(row, DataError):
            raise row
        yield row


def rows_in(file: Path, at: int = 0, number: int = 0) -> Iterator[tuple[int, Any]]:
    """Every row, or the DataError that it is, each with the place where the next one starts.

    Reading from such a place goes on with the next row. Places are bytes in text, and numbers of rows
    in Arrow's formats; `number` rows have been read before.
    """
    source = source_of(file)
    if isinstance(source, ParquetRows | ArrowRows):
        yield from source.read(at)
        return
    for start, text in source.places(at):
        number += 1
        yield start + len(text), parsed(source, start, text, number)


def parsed(source: TextRows, start: int, text: bytes, number: int) -> Any:
    """A row of a text file, or the DataError that says what it is instead."""
    try:
        return source.parse(text)
    except (ValueError, RecursionError) as error:  # nested too deeply, a number of 5000 digits ...
        return DataError(f"{source.file}, {source.complaint(start, number, error)}")


def source_of(file: Path) -> TextRows | ParquetRows | ArrowRows:
    match ending_of(file):
        case ".parquet":
            return ParquetRows(file)
        case ".arrow":
            return ArrowRows(file)
        case ".jsonl":
            return JsonlFile(file)
        case ".csv":
            return Csv(file)
        case _:
            return lines_or_list(file)


def ending_of(file: Path) -> str:
    ending = file.suffix.lower()
    if ending not in ENDINGS:
        raise DataError(
            f"{file} ends in {file.suffix!r}; readable are {', '.join(ENDINGS[:-1])} and {ENDINGS[-1]}"
        )
    return ending


def _chat(row: Any, where: str) -> list[Message]:
    try:
        return chat_of(row)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
