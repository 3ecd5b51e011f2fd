"""The location of rows, as one text: a file, a folder, a split of it, or a dataset of the hub.

data/train.jsonl          that file
data/GSM-8k               a folder with the files of one split
test@data/GSM-8k          one of its splits
train@axon-rl/GSM-8k      a dataset of the hub: a copy on this machine, else downloaded
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from graft.data.errors import DataError
from graft.data.hub import locate, read_hub
from graft.data.rows import ENDINGS
from graft.data.tables import RowTable, files_of, read_table

_SPLIT = re.compile(r"([\w.-]+)@(.+)")
_HUB = re.compile(r"[\w.-]+/[\w.-]+")


class DataLocation(NamedTuple):
    path: str
    split: str | None = None

    @property
    def is_hub(self) -> bool:
        """owner/name, and no file or folder on this machine has that path."""
        is_file = Path(self.path).suffix.lower() in ENDINGS
        is_here = Path(self.path).expanduser().exists()
        return bool(_HUB.fullmatch(self.path)) and not is_file and not is_here


def parse_location(text: str) -> DataLocation:
    """
    >>> parse_location("test@data/GSM-8k")
    DataLocation(path='data/GSM-8k', split='test')
    """
    match = _SPLIT.fullmatch(text)
    if match is None or Path(text).exists():
        return DataLocation(text)
    split, path = match[1], match[2]
    if Path(path).expanduser().is_file():
        if split != "train":  # a file is all of its data; the hub's library calls that train
            raise DataError(
                f"{text}: {path} is one file and has no splits; leave {split}@ out, or give a folder with "
                f"a file {split}.jsonl"
            )
        return DataLocation(path)
    return DataLocation(path, split)


def open_location(text: str, *, check: bool = True) -> RowTable:
    """The rows by number; check=False skips the check that every row can be parsed."""
    location = parse_location(text)
    if not location.is_hub:
        return read_table(location.path, location.split, check=check)
    try:
        return read_hub(location.path, location.split)
    except DataError as error:
        raise DataError(f"no file or folder {location.path!r}, and {error}") from error


def local_files(text: str) -> list[Path] | None:
    """The files that hold the rows; None if only the hub's library has them."""
    location = parse_location(text)
    if not location.is_hub:
        return files_of(location.path, location.split)
    folder = locate(location.path)
    return files_of(folder, location.split) if folder else None
