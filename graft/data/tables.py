"""Rows by number, from one file or from a folder with splits.

data/GSM-8k/train-00000-of-00001.parquet      read_table("data/GSM-8k", "train")
data/GSM-8k/test.jsonl                        read_table("data/GSM-8k", "test")
"""

from __future__ import annotations

import os
import re
import threading
from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from graft.data.arrow import RowGroups, arrow_rows, parquet_rows, table_rows
from graft.data.arrow_values import plain_rows
from graft.data.errors import DataError, NoSuchData
from graft.data.rows import ENDINGS, ending_of, parsed, scan_rows, text_rows
from graft.spelling import suggestion

NOT_ROWS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
SPLIT_FOLDERS = {"train", "test", "validation", "valid", "val", "dev"}
_SHARD = re.compile(r"-[0-9]{5}-of-[0-9]{5}(?:-[0-9a-f]+)?$")


class RowTable(Sequence[dict[str, Any]]):
    """Rows by number, each read when it is used. Rows must not be changed."""

    def __init__(self, rows: Any, source: str = "rows") -> None:
        self.rows = rows  # a sequence of dicts, or an Arrow table
        self.source = source
        """The file or dataset, for messages."""

    @property
    def parts(self) -> Sequence[RowTable]:
        """The tables that it joins, in order; one of its own is all of itself."""
        return self.rows.tables if isinstance(self.rows, JoinedRows) else (self,)

    def part_of(self, number: int) -> tuple[int, int]:
        """The part that holds a row, and the row's number in it."""
        return self.rows.part_of(number) if isinstance(self.rows, JoinedRows) else (0, number)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self.rows):
            raise IndexError(f"row {number} of {len(self.rows)} in {self.source}")
        if isinstance(self.rows, Sequence):
            row = self.rows[number]
        else:
            row = next(plain_rows(self.rows.slice(number, 1), self.source, number))
        if isinstance(row, DataError):
            raise row
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in self.scan():
            if isinstance(row, DataError):
                raise row
            yield row

    def scan(self) -> Iterator[Any]:
        """Every row in order, or the DataError about it: faster than one row at a time."""
        if isinstance(self.rows, JoinedRows):
            return (row for table in self.rows.tables for row in table.scan())
        if isinstance(self.rows, RowFile | RowGroups):
            return (row for file in self.rows.files for row in scan_rows(file))
        if isinstance(self.rows, Sequence):
            return iter(self.rows)
        return table_rows(self.rows, self.source)

    @property
    def columns(self) -> list[str]:
        if isinstance(self.rows, JoinedRows):
            return list(dict.fromkeys(name for one in self.rows.tables for name in one.columns))
        if not isinstance(self.rows, Sequence) or isinstance(self.rows, RowGroups):
            return self.rows.column_names
        readable = (row for row in islice(self.scan(), 20) if isinstance(row, Mapping))
        return list(next(readable, {}))


class JoinedRows(Sequence[dict[str, Any]]):
    """The rows of several tables, one table after the other."""

    def __init__(self, tables: Sequence[RowTable]) -> None:
        self.tables = tables
        self.ends = list(accumulate(map(len, tables)))

    def part_of(self, number: int) -> tuple[int, int]:
        index = bisect_right(self.ends, number)
        return index, number - (self.ends[index - 1] if index else 0)

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, number: Any) -> Any:
        index, offset = self.part_of(number)
        return self.tables[index][offset]


@lru_cache(maxsize=32)
def joined(tables: tuple[RowTable, ...]) -> RowTable:
    """Several tables as one; the same object for the same tables."""
    return RowTable(JoinedRows(tables), ", ".join(table.source for table in tables))


def read_table(path: str | Path, split: str | None = None, *, check: bool = True) -> RowTable:
    """All rows of a file, or of the files of one split in a folder.

    A row that cannot be parsed raises a DataError: here, or with check=False when the row is used.
    Equal arguments give the same RowTable, as long as the files do not change.
    """
    files = files_of(path, split)
    stamps = tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    with _loading:  # many threads may open one file: the first one reads it
        table = _load(stamps)
        if check:
            _check(table)
        return table


def files_of(path: str | Path, split: str | None = None) -> list[Path]:
    """The files that hold the rows of a file, or of one split in a folder."""
    found = Path(path).expanduser()
    if found.is_dir():
        splits = data_files(found)
        files = splits[choose_split(splits, split, str(found))]
    elif found.is_file():
        files = [found]
    else:
        start = "" if found.is_absolute() else f" in {Path.cwd()}"
        near = suggestion(found.name, [one.name for one in sorted(found.parent.glob("*"))[:1000]])
        raise NoSuchData(
            f"no file or folder {str(path)!r}{start};{near} give its path from there, or a dataset of the "
            "hub as train@OWNER/NAME"
        )
    if len({ending_of(file) for file in files}) > 1:
        names = ", ".join(file.name for file in files)
        raise DataError(f"{found} holds the same rows in several formats ({names}): name one file")
    name, times = Counter(file.name for file in files).most_common(1)[0]
    if times > 1:
        where = ", ".join(str(file.parent) for file in files if file.name == name)
        raise DataError(f"{found} holds {name} in several folders ({where}): name one of them")
    return files


def name_of(files: Sequence[Path]) -> str:
    """The files as messages name them: "a.jsonl", or "data (3 files)"."""
    return str(files[0]) if len(files) == 1 else f"{files[0].parent} ({len(files)} files)"


_loading = threading.Lock()


@lru_cache(maxsize=32)
def _load(stamps: tuple[tuple[str, int, int], ...]) -> RowTable:
    files = [Path(name) for name, _, _ in stamps]
    match ending_of(files[0]):
        case ".parquet":
            return RowTable(parquet_rows(files), name_of(files))
        case ".arrow":
            return RowTable(arrow_rows(files), name_of(files))
        case _:
            return RowTable(RowFile(files), name_of(files))


@lru_cache(maxsize=32)
def _check(table: RowTable) -> None:
    """Parse every row of a text file; parquet and arrow always have named columns."""
    if isinstance(table.rows, RowFile):
        for _ in table:
            pass


class RowFile(Sequence[dict[str, Any]]):
    """The rows of jsonl, json and csv files by number; only the start of each is kept in memory.

    A million rows take 8 MB, whatever their length. A row is read and parsed each time it is used.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files
        self.sources = [text_rows(file) for file in files]
        self.stamps = [_stamp(file.stat()) for file in files]
        self.starts = [array("Q") for _ in files]
        for source, starts in zip(self.sources, self.starts, strict=True):
            starts.extend(start for start, _ in source.records())
        self.ends = list(accumulate(map(len, self.starts)))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, number: Any) -> Any:
        index = bisect_right(self.ends, number)
        source, starts = self.sources[index], self.starts[index]
        offset = number - (self.ends[index] - len(starts))
        start = starts[offset]
        is_last = offset + 1 == len(starts)
        size = (self.stamps[index][0] if is_last else starts[offset + 1]) - start
        with source.file.open("rb") as file:
            if _stamp(os.fstat(file.fileno())) != self.stamps[index]:
                raise DataError(
                    f"{source.file} was changed while it was in use, so its rows have moved; start again, "
                    "and do not write to the file during the run"
                )
            file.seek(start)
            return parsed(source, start, file.read(size), offset + 1)


def _stamp(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns


def data_files(folder: Path) -> dict[str, list[Path]]:
    """The files with rows below a folder, by split: the start of the file's name, or the folder that
    holds it (test/data.jsonl belongs to the split "test").

    {"train": [.../train-00000-of-00002.parquet, .../train-00001-of-00002.parquet]}
    """
    found: dict[str, list[Path]] = defaultdict(list)
    for file in sorted(folder.rglob("*")):
        inner = file.relative_to(folder).parts
        is_hidden = any(part.startswith(".") for part in inner)
        is_rows = file.suffix.lower() in ENDINGS and file.name not in NOT_ROWS
        if is_rows and not is_hidden and file.is_file():  # a pipe or a device may never end
            found[_split_name(inner)].append(file)
    return dict(found)


def _split_name(path: Sequence[str]) -> str:
    """("data", "train-00000-of-00002.parquet") -> "train"; ("test", "part.jsonl") -> "test"."""
    *folders, file = path
    name = _SHARD.sub("", Path(file).stem)
    if name in SPLIT_FOLDERS:
        return name
    for folder in reversed(folders):
        if folder in SPLIT_FOLDERS:
            return folder
    return folders[-1] if folders and name.isdigit() else name


def choose_split(splits: Any, split: str | None, where: str) -> str:
    """The name among `splits` that `split` means; without `split` the only one."""
    names = list(splits)
    if not names:
        raise DataError(f"{where} holds no {', '.join(ENDINGS)} file")
    if split is None:
        if len(names) == 1:
            return names[0]
        raise DataError(f"{where} has several splits ({', '.join(names)}): choose one, split=...")
    if split in names:
        return split
    # test_v2 and test-small are test; tests is not
    close = [n for n in names if n.startswith(split) and not n[len(split)].isalnum()]
    if len(close) == 1:
        return close[0]
    raise DataError(f"{where} has no split {split!r}; it has {', '.join(names)}")
