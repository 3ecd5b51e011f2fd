"""Rows from files people have: jsonl, json or parquet, one file or a folder with splits.

data/GSM-8k/train-00000-of-00001.parquet      read_table("data/GSM-8k", "train")
data/GSM-8k/test.jsonl                        read_table("data/GSM-8k", "test")
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from graft.types import Message

ROLES = ("system", "user", "assistant", "tool")
ENDINGS = (".parquet", ".jsonl", ".json")
NOT_ROWS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_SHARD = re.compile(r"-[0-9]{5}-of-[0-9]{5}(?:-[0-9a-f]+)?$")


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


class Table(Sequence[dict[str, Any]]):
    """Rows by number. Parquet stays packed until a row is asked for; nobody changes a row."""

    def __init__(self, rows: Any, source: str = "rows") -> None:
        self.rows = rows  # a list of dicts, or an Arrow table
        self.source = source
        """Where the rows are from, for messages."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self.rows):
            raise IndexError(f"row {number} of {len(self.rows)} in {self.source}")
        if isinstance(self.rows, list):
            return self.rows[number]
        return self.rows.slice(number, 1).to_pylist()[0]

    @property
    def columns(self) -> list[str]:
        if isinstance(self.rows, list):
            return list(self.rows[0]) if self.rows and isinstance(self.rows[0], dict) else []
        return self.rows.column_names

    def column(self, name: str) -> list[Any]:
        """All values of one column; None where a row lacks it."""
        if isinstance(self.rows, list):
            return [row.get(name) for row in self.rows]
        return self.rows.column(name).to_pylist()


def read_table(path: str | Path, split: str | None = None) -> Table:
    """All rows of a file, or of the files of one split in a folder.

    Equal arguments give the same Table, as long as the files do not change.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        splits = data_files(place)
        files = splits[choose_split(splits, split, str(place))]
    elif place.is_file():
        files = [place]
    else:
        raise DataError(f"no file or folder {str(path)!r}")
    if len({file.suffix for file in files}) > 1:
        names = ", ".join(file.name for file in files)
        raise DataError(f"{place} holds the same rows in several formats ({names}): name one file")
    stamps = tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    return _load(stamps)


def data_files(folder: Path) -> dict[str, list[Path]]:
    """The files with rows below a folder, by split; the split is what a file's name starts with.

    {"train": [.../train-00000-of-00002.parquet, .../train-00001-of-00002.parquet]}
    """
    found: dict[str, list[Path]] = defaultdict(list)
    for file in sorted(folder.rglob("*")):
        inner = file.relative_to(folder).parts
        is_hidden = any(part.startswith(".") for part in inner)
        if file.suffix in ENDINGS and not is_hidden and file.name not in NOT_ROWS:
            name = _SHARD.sub("", file.stem)
            if name.isdigit() and len(inner) > 1:  # train/0000.parquet
                name = inner[-2]
            found[name].append(file)
    return dict(found)


def choose_split(splits: Any, split: str | None, where: str) -> str:
    """The one of `splits` that was asked for, or the only one there is."""
    names = list(splits)
    if not names:
        raise DataError(f"{where} holds no {', '.join(ENDINGS)} file")
    if split is None:
        if len(names) == 1:
            return names[0]
        raise DataError(f"{where} has several splits ({', '.join(names)}): say which, split=...")
    if split in names:
        return split
    # test_v2 and test-small are test; tests is not
    close = [n for n in names if n.startswith(split) and not n[len(split)].isalnum()]
    if len(close) == 1:
        return close[0]
    raise DataError(f"{where} has no split {split!r}; it has {', '.join(names)}")


@lru_cache(maxsize=32)
def _load(stamps: tuple[tuple[str, int, int], ...]) -> Table:
    files = [Path(name) for name, _, _ in stamps]
    source = str(files[0]) if len(files) == 1 else f"{files[0].parent} ({len(files)} files)"
    if files[0].suffix == ".parquet":
        return Table(_arrow(files), source)
    rows = [row for file in files for row in read_rows(str(file))]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{source}, row {number} is {type(row).__name__}, not an object")
    return Table(rows, source)


def _arrow(files: Sequence[Path]) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        # one file each: read_table would take a folder called x=1 for a column
        tables = [pyarrow.parquet.ParquetFile(file).read() for file in files]
        return pyarrow.concat_tables(tables, promote_options="default")
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{files[0]} is not a parquet file: {error}") from error


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
