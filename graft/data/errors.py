"""Errors about a file, a row or a field of a row."""

from __future__ import annotations

from typing import NamedTuple


class DataError(ValueError):
    """A file or row that cannot be used; the message names the row, the field and the reason."""


class NoSuchData(DataError):
    """A name that is no file, folder or dataset."""

    is_usage = True


class BadField(ValueError):
    """A field of a row that cannot be used; the caller adds the file and the row."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


class RowFault(NamedTuple):
    """One bad row: RowFault(7, "prompt", "'prompt': holds nothing, not a list of messages ...")."""

    row: int
    """Counted from 1, as editors do."""
    field: str
    """The column, or "" where the row as a whole cannot be read."""
    why: str
