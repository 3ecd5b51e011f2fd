"""What is wrong with a file or a row, in words for whoever has to mend it."""

from __future__ import annotations

from typing import NamedTuple


class DataError(ValueError):
    """A file or row that cannot be used; the text names the row, the field and why."""


class BadField(ValueError):
    """A field of a row that cannot be used; whoever knows the file and the row says them."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


class Fault(NamedTuple):
    """One bad row: Fault(7, "prompt", "'prompt': holds nothing, not a list of messages ...")."""

    row: int
    """Counted from 1, as editors do."""
    field: str
    """The column, or "" where the row as a whole cannot be read."""
    why: str
