"""Chats to imitate, by number, from a file that stays on the disk.

chats = open_chats("chats.jsonl")
len(chats), chats[0].messages, chats[0].tools, chats[0].spans

A row is read and parsed when it is used, so a file may be larger than memory and still be read in a
shuffled order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graft.data.check import SPARED, check
from graft.data.layouts import RowLayout, detect_layout
from graft.data.location import open_location
from graft.data.readers import ChatRow
from graft.data.tables import RowTable


class Chats(Sequence[ChatRow]):
    """The good rows of a table as chats. `bad` is the number of rows that were left out."""

    def __init__(
        self, table: RowTable, layout: RowLayout, numbers: Sequence[int], bad: int
    ) -> None:
        self.table = table
        self.layout = layout
        self.numbers = numbers
        self.bad = bad

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: Any) -> Any:
        assert self.layout.chat is not None
        return self.layout.chat(self.table[self.numbers[number]])

    def where(self, number: int) -> str:
        """The file and the row of a chat, counted from 1, for messages."""
        return f"{self.table.source}, row {self.numbers[number] + 1}"


def open_chats(path: str, skip_bad: bool | float = SPARED, layout: str = "auto") -> Chats:
    """The chats of a file, a folder, SPLIT@PATH or a dataset of the hub; every row is checked once.

    Bad rows are left out, counted and reported once, up to the share `skip_bad`; more of them raise a
    DataError that names the first.
    """
    table = open_location(path, check=False)
    found = detect_layout(table.scan(), table.source, layout, "chat")
    verdict = check(table, found, "chat", skip_bad)
    return Chats(table, found, verdict.good(range(len(table))), len(verdict.bad))
