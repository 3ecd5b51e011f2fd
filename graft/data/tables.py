"""Rows by number, from one file or from a folder with splits.

data/GSM-8k/train-00000-of-00001.parquet      read_table("data/GSM-8k", "train")
data/GSM-8k/test.jsonl                        read_table("data/GSM-8k", "test")
"""

from __future__ import annotations

import json
import re
import threading
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from graft.data.rows import ENDINGS, DataError, arrow_table, ending_of, json_lines, json_rows

NOT_ROWS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
SPLIT_FOLDERS = {"train", "test", "validation", "valid", "val", "dev"}
_SHARD = re.compile(r"-[0-9]{5}-of-[0-9]{5}(?:-[0-9a-f]+)?$")


class Table(Sequence[dict[str, Any]]):
    """Rows by number. Files stay packed until a row is asked for; nobody changes a row."""

    def __init__(self, rows: Any, source: str = "rows") -> None:
        self.rows = rows  # a sequence of dicts, or an Arrow table
        self.source = source
        """Where the rows are from, for messages."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self.rows):
            raise IndexError(f"row {number} of {len(self.rows)} in {self.source}")
        if isinstance(self.rows, Sequence):
            return self.rows[number]
        return self.rows.slice(number, 1).to_pylist()[0]

    @property
    def columns(self) -> list[str]:
        if isinstance(self.rows, Sequence):
            return list(self.rows[0]) if self.rows else []
        return self.rows.column_names

    def column(self, name: str) -> list[Any]:
        """All values of one column; None where a row lacks it."""
        if isinstance(self.rows, Sequence):
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
    if len({ending_of(file) for file in files}) > 1:
        names = ", ".join(file.name for file in files)
        raise DataError(f"{place} holds the same rows in several formats ({names}): name one file")
    name, times = Counter(file.name for file in files).most_common(1)[0]
    if times > 1:
        where = ", ".join(str(file.parent) for file in files if file.name == name)
        raise DataError(f"{place} holds {name} in several folders ({where}): name one of them")
    stamps = tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    with _loading:  # sixty-four threads that open one file shall not read it sixty-four times
        return _load(stamps)


_loading = threading.Lock()


@lru_cache(maxsize=32)
def _load(stamps: tuple[tuple[str, int, int], ...]) -> Table:
    files = [Path(name) for name, _, _ in stamps]
    source = str(files[0]) if len(files) == 1 else f"{files[0].parent} ({len(files)} files)"
    match ending_of(files[0]):
        case ".parquet":
            return Table(arrow_table(files), source)
        case ".jsonl":
            return Table(Lines(files), source)
        case _:
            rows = [row for file in files for row in json_rows(file)]
            for number, row in enumerate(rows, 1):
                _check_row(row, source, number)
            return Table(rows, source)


class Lines(Sequence[dict[str, Any]]):
    """The rows of jsonl files, checked once and kept as text: a million of them take the memory of
    the file and not five times as much. A row is parsed whenever it is asked for.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.text = bytearray()
        self.ends = array("Q", [0])
        for file in files:
            for line, row in json_lines(file):
                _check_row(row, file, len(self) + 1)
                self.text += line
                self.ends.append(len(self.text))

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, number: Any) -> Any:
        return json.loads(self.text[self.ends[number] : self.ends[number + 1]])


def _check_row(row: Any, where: Any, number: int) -> None:
    if not isinstance(row, dict):
        raise DataError(
            f"{where}, row {number} is {type(row).__name__}, not an object with named fields"
        )


def data_files(folder: Path) -> dict[str, list[Path]]:
    """The files with rows below a folder, by split; the split is what a file's name starts with, or
    the folder it lies in: test/data.jsonl is of the split "test".

    {"train": [.../train-00000-of-00002.parquet, .../train-00001-of-00002.parquet]}
    """
    found: dict[str, list[Path]] = defaultdict(list)
    for file in sorted(folder.rglob("*")):
        inner = file.relative_to(folder).parts
        is_hidden = any(part.startswith(".") for part in inner)
        if file.suffix.lower() in ENDINGS and not is_hidden and file.name not in NOT_ROWS:
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
