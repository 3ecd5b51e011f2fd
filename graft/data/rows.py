"""Rows from files people have: chats in jsonl, json or parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graft.types import Message

ROLES = ("system", "user", "assistant", "tool")


class DataError(ValueError):
    """A file or row that cannot be used; the text names the row, the field and why."""


def read_chats(path: str) -> list[list[Message]]:
    """The `messages` of every row: lists of {role, content}, each with an assistant turn to learn."""
    chats = [_chat(row, f"{path}, row {number}") for number, row in enumerate(read_rows(path), 1)]
    if not chats:
        raise DataError(f"{path} has no rows")
    return chats


def read_rows(path: str) -> Iterator[dict[str, Any]]:
    """Rows as dicts; the format is the file's ending."""
    file = Path(path)
    if not file.is_file():
        raise DataError(f"no file {path!r}")
    if file.suffix == ".parquet":
        yield from _parquet(file)
    elif file.suffix in (".jsonl", ".json"):
        yield from _json_lines(file) if file.suffix == ".jsonl" else _json(file)
    else:
        raise DataError(f"{path} ends in {file.suffix!r}; readable are .jsonl, .json and .parquet")


def _json_lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{file}, line {number} is not JSON: {error}") from error


def _json(file: Path) -> Iterator[dict[str, Any]]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"{file} is not JSON: {error}") from error
    if not isinstance(rows, list):
        raise DataError(f"{file} holds {type(rows).__name__}, not a list of rows")
    yield from rows


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
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise DataError(f"{where}: no list `messages` (found: {found})")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, dict) else message
            raise DataError(
                f"{where}, message {number}: role {role!r} is none of {', '.join(ROLES)}"
            )
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where}: no assistant message, so there is nothing to learn")
    if messages[0]["role"] == "assistant":
        raise DataError(f"{where}: starts with the assistant; there must be something to answer")
    # parquet fills every struct with every key: absent ones come as None
    return [{k: v for k, v in message.items() if v is not None} for message in messages]
