"""The head of a GGUF file: its entries, and where its tensors lie. Counts and sizes must fit the file.

    GGUF, version, number of tensors, number of entries
    entry:   name, kind, value         a text is its length and its bytes; an array is kind, length, values
    tensor:  name, sizes, kind, offset
    data     from the next multiple of the alignment; offsets count from here

The gguf package reads the same in 20 seconds, since a vocabulary has 300,000 texts, and believes every
number: an array of 2 ** 40 texts would run for hours.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

SCALARS: dict[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"
}  # fmt: skip
"""Kinds of values, as `struct` names them."""
TEXT, ARRAY = 8, 9
MAX_ENTRIES, MAX_TENSORS = 10_000, 100_000
MAX_VALUES = 1_000_000
"""In arrays of all entries. Gemma's vocabulary has 262,144 texts, with a score and a kind each."""
MAX_NAME = 1 << 16
MAX_TEXT = 1 << 24
MAX_SIZES = 4
"""The most sizes of a tensor: llama.cpp has no more."""
ALIGNMENT = 32
"""The alignment of the data, if no entry names another."""
NUMBER = struct.Struct("<I")
LENGTH = struct.Struct("<Q")


class GgufHeadError(ValueError):
    """Counts or sizes that the file cannot hold."""


class GgufTensor(NamedTuple):
    """One tensor: its sizes, the slowest first, the number of its kind, and its first byte in the file."""

    sizes: tuple[int, ...]
    kind: int
    start: int


class GgufHead(NamedTuple):
    """All that a GGUF file says before its data."""

    entries: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_head(path: Path) -> GgufHead:
    """Raise GgufHeadError for a head that is damaged, or made to fill the memory."""
    if not path.stat().st_size:  # which cannot be mapped
        raise GgufHeadError("it is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        try:
            return _Walk(content).read()
        except struct.error:
            raise GgufHeadError("it is cut off") from None


class _Walk:
    """A walk through the bytes of a head, from its start to its end."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.size = content, len(content)
        self.at, self.num_values = 0, 0

    def read(self) -> GgufHead:
        if self.content[:4] != b"GGUF":
            raise GgufHeadError("it does not begin with GGUF")
        self.at = 4
        version = self.number()
        if version not in (2, 3):
            # a machine with the other order of bytes writes 3 as 50331648
            raise GgufHeadError(f"version {version} is not 2 or 3, little-endian")
        num_tensors, num_entries = self.length(), self.length()
        _check_count("tensors", num_tensors, MAX_TENSORS)
        _check_count("entries", num_entries, MAX_ENTRIES)
        entries: dict[str, Any] = {}
        for _ in range(num_entries):
            name = self.text(MAX_NAME)
            _check_new("entries", name, entries)
            entries[name] = self.value(self.number())
        tensors: dict[str, GgufTensor] = {}
        for _ in range(num_tensors):
            name = self.text(MAX_NAME)
            _check_new("tensors", name, tensors)
            tensors[name] = self.tensor()
        alignment = entries.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise GgufHeadError(f"general.alignment={alignment!r} is no power of two")
        data = -(-self.at // alignment) * alignment
        return GgufHead(
            entries, {name: t._replace(start=data + t.start) for name, t in tensors.items()}
        )

    def tensor(self) -> GgufTensor:
        num_sizes = _check_count("sizes", self.number(), MAX_SIZES)
        sizes = [self.length() for _ in range(num_sizes)]
        kind, offset, count = self.number(), self.length(), 1
        for size in sizes:
            count *= size
        # a number takes a quarter of a byte or more
        if offset > self.size or count > 4 * self.size:
            raise GgufHeadError(f"a tensor of {count:,} numbers at {offset:,} is not in the file")
        return GgufTensor(tuple(sizes[::-1]), kind, offset)  # stored with the fastest first

    def value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text(MAX_TEXT)
        if kind in SCALARS:
            return self.scalars(kind, 1)[0]
        if kind != ARRAY:
            raise GgufHeadError(f"an entry is of kind {kind}")
        inner, length = self.number(), self.length()
        self.num_values += length
        _check_count("values in arrays", self.num_values, MAX_VALUES)
        if inner == TEXT:
            return [self.text(MAX_TEXT) for _ in range(length)]
        if inner not in SCALARS:
            raise GgufHeadError(f"an array holds values of kind {inner}")
        return list(self.scalars(inner, length))

    def scalars(self, kind: int, count: int) -> tuple[Any, ...]:
        form = f"<{count}{SCALARS[kind]}"
        start = self.skip(struct.calcsize(form))
        return struct.unpack_from(form, self.content, start)

    def text(self, most: int) -> str:
        length = self.length()
        if length > most:
            _check_count("bytes in a text", length, most)
        start = self.skip(length)
        return self.content[start : self.at].decode()

    def skip(self, count: int) -> int:
        """The place before the next `count` bytes; the walk goes on after them."""
        start = self.at
        if count > self.size - start:
            raise GgufHeadError(f"{count:,} bytes are missing at its end")
        self.at = start + count
        return start

    def number(self) -> int:
        self.at += 4
        return NUMBER.unpack_from(self.content, self.at - 4)[0]

    def length(self) -> int:
        self.at += 8
        return LENGTH.unpack_from(self.content, self.at - 8)[0]


def _check_count(what: str, count: int, most: int) -> int:
    if count > most:
        raise GgufHeadError(f"it says that it has {count:,} {what}; at most {most:,} are read")
    return count


def _check_new(what: str, name: str, known: dict[str, Any]) -> None:
    if name in known:
        raise GgufHeadError(f"two of its {what} are named {name[:80]!r}")
