"""Rows of one file in order: parquet, jsonl, json, csv or arrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graft.data.arrow import map_arrow, scan_parquet, table_rows
from graft.data.errors import DataError
from graft.data.records import Csv, JsonlFile, TextRows, json_or_jsonl

ENDINGS = (".parquet", ".jsonl", ".json", ".csv", ".arrow")


def read_rows(path: str) -> Iterator[dict[str, Any]]:
    """Rows as dicts; the file's ending says the format. The first bad row raises its DataError."""
    file = Path(path)
    if not file.is_file():
        raise DataError(f"no file {path!r}")
    for row in scan_rows(file):
        if isinstance(row, DataError):
            raise row
        yield row


def scan_rows(file: Path) -> Iterator[Any]:
    """Every row, or the DataError about it in its place."""
    match ending_of(file):
        case ".parquet":
            yield from scan_parquet(file)
        case ".arrow":
            yield from table_rows(map_arrow(file), str(file))
        case _:
            source = text_rows(file)
            for number, (start, text) in enumerate(source.records(), 1):
                yield parsed(source, start, text, number)


def parsed(source: TextRows, start: int, text: bytes, number: int) -> Any:
    """A row of a text file, or the DataError that says why it is none."""
    try:
        return source.parse(text)
    except (ValueError, RecursionError) as error:  # nested too deeply, a number of 5000 digits ...
        return DataError(f"{source.file}, {source.describe_error(start, number, error)}")


def text_rows(file: Path) -> TextRows:
    match ending_of(file):
        case ".jsonl":
            return JsonlFile(file)
        case ".csv":
            return Csv(file)
        case _:
            return json_or_jsonl(file)


def ending_of(file: Path) -> str:
    ending = file.suffix.lower()
    if ending not in ENDINGS:
        raise DataError(
            f"{file} ends in {file.suffix!r}; readable are {', '.join(ENDINGS[:-1])} and {ENDINGS[-1]}"
        )
    return ending
