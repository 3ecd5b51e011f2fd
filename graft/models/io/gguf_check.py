"""The head of a GGUF file, walked before the gguf package reads it: counts and sizes must fit the file.

    GGUF, version, number of tensors, number of entries
    entry:   name, kind, value         a text is its length and its bytes; an array is kind, length, values
    tensor:  name, sizes, kind, offset

The package believes these numbers: an array of 2 ** 40 texts or a size of 2 ** 62 would run for hours.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import IO

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value, by its kind."""
TEXT, ARRAY = 8, 9
MAX_ENTRIES, MAX_TENSORS = 10_000, 100_000
MAX_VALUES = 1_000_000
"""In arrays of all entries: the package takes some 600 bytes for each. Gemma's vocabulary has 262,144."""
MAX_NAME = 1 << 16
MAX_TEXT = 1 << 24
MAX_SIZES = 4
"""Of a tensor: llama.cpp has no more."""


class GgufHeadError(ValueError):
    """Counts or sizes that the file cannot hold."""


def check_gguf(path: Path) -> None:
    """Raise GgufHeadError for a head that is damaged, or made to fill the memory."""
    with path.open("rb") as file:
        _Head(file, path.stat().st_size).check()


class _Head:
    def __init__(self, file: IO[bytes], size: int) -> None:
        self.file, self.size = file, size
        self.order, self.values = "<", 0

    def check(self) -> None:
        if self.file.read(4) != b"GGUF":
            raise GgufHeadError("it does not begin with GGUF")
        version = self.number("I")
        if version > 1 << 16:  # written on a machine with the other order of bytes
            self.order, version = ">", version.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in (2, 3):
            raise GgufHeadError(f"version {version} is not 2 or 3")
        tensors, entries = self.number("Q"), self.number("Q")
        _check_count("tensors", tensors, MAX_TENSORS)
        _check_count("entries", entries, MAX_ENTRIES)
        for _ in range(entries):
            self.text(MAX_NAME)
            self.value(self.number("I"))
        for _ in range(tensors):
            self.tensor()

    def tensor(self) -> None:
        self.text(MAX_NAME)
        sizes = [
            self.number("Q") for _ in range(_check_count("sizes", self.number("I"), MAX_SIZES))
        ]
        self.number("I")
        offset, count = self.number("Q"), 1
        for size in sizes:
            count *= size
        # a number takes a quarter of a byte or more
        if offset > self.size or count > 4 * self.size:
            raise GgufHeadError(f"a tensor of {count:,} numbers at {offset:,} is not in the file")

    def value(self, kind: int) -> None:
        if kind == TEXT:
            self.text(MAX_TEXT)
        elif kind in SIZES:
            self.skip(SIZES[kind])
        elif kind == ARRAY:
            inner, length = self.number("I"), self.number("Q")
            self.values += length
            _check_count("values in arrays", self.values, MAX_VALUES)
            if inner in SIZES:
                self.skip(SIZES[inner] * length)
            elif inner == TEXT:
                for _ in range(length):
                    self.text(MAX_TEXT)
            else:
                raise GgufHeadError(f"an array holds values of kind {inner}")
        else:
            raise GgufHeadError(f"an entry is of kind {kind}")

    def text(self, most: int) -> None:
        self.skip(_check_count("bytes in a text", self.number("Q"), most))

    def skip(self, count: int) -> None:
        if count > self.size - self.file.tell():
            raise GgufHeadError(f"{count:,} bytes are missing at its end")
        self.file.seek(count, 1)

    def number(self, kind: str) -> int:
        content = self.file.read(struct.calcsize(kind))
        if len(content) < struct.calcsize(kind):
            raise GgufHeadError("it is cut off")
        return struct.unpack(self.order + kind, content)[0]


def _check_count(what: str, found: int, most: int) -> int:
    if found > most:
        raise GgufHeadError(f"it says that it has {found:,} {what}; at most {most:,} are read")
    return found
