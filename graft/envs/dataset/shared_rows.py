"""Rows that are trained on and scored as held out: then scores measure memory too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graft.data.tables import RowTable


def num_shared_rows(trained: Any, held_out: Any, seeds: Sequence[int]) -> int:
    """Of the rows that these seeds choose in `held_out`, how many `trained` has too; wrapped or not.

    trained: rows 0-9 of a file, held out: all of its 12 rows, seeds 8, 9, 10, 11    -> 2
    """
    ours, theirs = _rows(trained), _rows(held_out)
    if ours is None or theirs is None:
        return 0  # tasks are drawn, and held-out seeds are not training seeds
    (table, numbers), (scored_table, scored_numbers) = ours, theirs
    places = {_identity(part): index for index, part in enumerate(table.parts)}
    starts = np.cumsum([0, *(len(part) for part in table.parts)])
    wanted: set[int] = set()
    for seed in seeds:
        part, row = scored_table.part_of(scored_numbers[seed % len(scored_numbers)])
        index = places.get(_identity(scored_table.parts[part]))
        if index is not None:
            wanted.add(int(starts[index]) + row)
    if isinstance(numbers, range):
        return sum(number in numbers for number in wanted)
    return int(np.isin(sorted(wanted), np.asarray(numbers)).sum()) if wanted else 0


def same_file(table: RowTable, path: Path) -> bool:
    """Whether a table is this one file, however its path is written."""
    return path.is_file() and _identity(table) == path.resolve()


def _identity(table: RowTable) -> Path | int:
    """The file behind a table; of several files or none the object, which is the same for equal paths."""
    file = Path(table.source)
    return file.resolve() if table.source and file.is_file() else id(table)


def _rows(env: Any) -> tuple[RowTable, Sequence[int]] | None:
    inner = getattr(env, "unwrapped", env)
    table = getattr(inner, "table", None)
    return (table, inner.numbers) if isinstance(table, RowTable) else None
