"""Rows that are trained on and scored as held out: then scores measure memory too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from graft.data.asked import SAMPLE, AskedRows, AskedText, repeated, texts_of
from graft.data.errors import DataError
from graft.data.tables import RowTable
from graft.envs.dataset.prompts import placeholders

MAX_ROWS = 100_000
"""Rows of one set that are compared; of a larger one every n-th, which is said."""


@dataclass(frozen=True, slots=True)
class RowSet:
    """Rows of a table, and the columns that hold their questions beside the usual ones."""

    name: str
    table: RowTable
    numbers: Sequence[int]
    columns: Sequence[str] = ()

    @classmethod
    def of_env(cls, name: str, env: Any, seeds: Sequence[int] | None = None) -> RowSet | None:
        """The rows of an environment, or those that `seeds` choose; None if it draws its tasks."""
        inner = getattr(env, "unwrapped", env)
        table = getattr(inner, "table", None)
        if not isinstance(table, RowTable):
            return None
        numbers = inner.numbers
        if seeds is not None:
            numbers = [numbers[place] for place in {seed % len(numbers) for seed in seeds}]
        columns = [getattr(inner, "question_key", "")]
        columns += placeholders(getattr(inner, "template", ""), table)
        return cls(name, table, numbers, [one for one in columns if one])

    def is_same(self, other: RowSet) -> bool:
        return self.table is other.table and self.numbers == other.numbers

    @property
    def step(self) -> int:
        """1: all rows are compared; n: every n-th."""
        return max(1, math.ceil(len(self.numbers) / MAX_ROWS))

    @property
    def sampling(self) -> str:
        """What part of the rows is compared; "" for all of them."""
        compared, total = len(self.numbers[:: self.step]), len(self.numbers)
        return "" if self.step == 1 else f"{compared:,} of the {total:,} rows of {self.name}"

    def texts(self) -> Iterator[list[str]]:
        """The texts of each compared row; none of a row that cannot be read."""
        for place in range(0, len(self.numbers), self.step):
            try:
                row: Any = self.table[self.numbers[place]]
            except DataError:
                row = None
            yield texts_of(row, self.columns)


def shared_rows(held_out: Sequence[RowSet], trained: RowSet) -> list[set[int]]:
    """The places of each held-out set's rows that `trained` has too; every trained row is read once.

    held out: rows 8 to 11 of a file, trained: its rows 0 to 9    -> [{0, 1}]
    """
    indices = [AskedRows(list(one.texts())) for one in held_out]
    found: list[set[int]] = [set() for _ in held_out]
    first = RowSet(trained.name, trained.table, trained.numbers[:SAMPLE], trained.columns)
    without = repeated(first.texts())
    for texts in trained.texts():
        asked = [text for one in texts if (text := AskedText.of(one, without)).words]
        for index, rows in zip(indices, found, strict=True):
            rows |= index.find(asked)
    return found
