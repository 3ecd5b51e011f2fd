"""The base class of dataset environments: where rows come from, and which row comes next.

env.reset(seed=7)    row 7 (modulo the number of rows): seeds 0, 1, 2, ... are the whole set
env.reset(idx=7)     the same, and an error if there are only 7
env.reset()          the next row in shuffled order, reshuffled after each pass; with
                     evaluation=True the next row of the file
"""

from __future__ import annotations

import hashlib
import operator
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from graft.data.errors import BadField, DataError
from graft.data.fields import is_gold
from graft.data.hub import read_hub, splits_of
from graft.data.location import open_location, parse_location
from graft.data.pictures import COLUMNS, refuse_pictures
from graft.data.rows import ENDINGS
from graft.data.tables import RowTable, data_files, joined, read_table
from graft.envs.base import BaseEnv
from graft.envs.splits import SPLITS, split_of
from graft.protocols import Observation

DataPlaces = str | Sequence[str] | None
"""A file, a folder, SPLIT@PATH or a dataset of the hub, or a list of them; None: none of these."""


class DatasetEnv(BaseEnv):
    """One row, one answer. A subclass writes `ask` (row to prompt and answer) and `respond`.

    Rows are `rows=` (in memory) or `data=` (a file, or a folder with one file per split), else those
    of `hub=`, the name of a dataset on the hub. `split` picks the split, by default `hub_split`. Data
    without splits is divided if `split` is "train" or "test": one row in ten, by its question, is
    "test". Without `split` all rows are used.

    `data=` may list several: their rows alternate in proportion to their numbers, and the data source
    of a row that names none is its file.
    """

    blocking = True
    checks_rows = False
    """Whether a subclass checks all rows before they are used, and may leave bad ones out."""
    # rows never change: a snapshot needs only their number
    shared = ("table", "numbers", "names", "prompt", "answer")
    saved = ("seed", "turns", "is_over", "walk")

    def __init__(
        self,
        *,
        data: DataPlaces = None,
        rows: Sequence[Mapping[str, Any]] | None = None,
        hub: str | None = None,
        hub_split: str | None = None,
        split: str | None = None,
        question_key: str | Sequence[str] = "problem",
        columns: Sequence[str] = (),
        evaluation: bool = False,
    ) -> None:
        super().__init__()
        self.evaluation = evaluation
        self.split = split or hub_split or "train"
        self.table, divided = open_table(
            data, rows, hub, split, hub_split, check=not self.checks_rows
        )
        parts = self.table.parts
        self.names = [] if data is None or isinstance(data, str) else names_of(data)
        """Of the listed files, in order; empty for a single one."""
        keys = [question_key] * len(parts) if isinstance(question_key, str) else question_key
        self.question_key = keys[0]
        for part, key in zip(parts, keys, strict=True):
            check_columns(part, (key, *columns))
        self.numbers: Sequence[int] = interleaved(
            [
                rows_of_split(part, key, self.split) if is_divided else range(len(part))
                for part, key, is_divided in zip(parts, keys, divided, strict=True)
            ],
            [len(part) for part in parts],
        )
        if not self.numbers:
            raise DataError(
                f"{self.table.source}, {len(self.table)} rows, has none for split={self.split!r}; one "
                "row in ten is a test row: give more of them, or a folder with train.jsonl and test.jsonl"
            )
        self.walk = [self.rng.getrandbits(53), 0]  # the key of the order, and the position in it
        if not self.checks_rows:
            self.refuse_pictures()

    def refuse_pictures(self) -> None:
        """DataError if a row holds more than text."""
        for part in self.table.parts:
            if (found := first_picture(part)) is not None:
                raise DataError(found)

    def ask(self, row: Mapping[str, Any]) -> Observation:
        """The prompt of a row; sets `self.answer`."""
        raise NotImplementedError(f"{type(self).__name__} must write ask()")

    @property
    def idx(self) -> int:
        """The current row, from 0."""
        return self.seed % len(self.numbers)

    @property
    def place(self) -> tuple[int, int]:
        """The number of the current row's file, and of the row in it."""
        return self.table.part_of(self.numbers[self.idx])

    def reset(
        self, seed: int | None = None, idx: int | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        if idx is not None:
            if seed is not None:
                raise ValueError(f"seed={seed} and idx={idx} both choose a row: give one")
            if not 0 <= operator.index(idx) < len(self.numbers):
                raise ValueError(f"idx={idx}: rows are numbered 0 to {len(self.numbers) - 1}")
            return self._posed(idx)
        if seed is not None:
            # a walk in file order continues after the chosen row, a shuffled one starts again
            after = operator.index(seed) % len(self.numbers) + 1
            self.walk = [operator.index(seed), after if self.evaluation else 0]
            return self._posed(seed)
        return self._posed(self._next())

    def _posed(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        prompt, info = super().reset(seed)
        if self.names:
            row = self.table[self.numbers[self.idx]]
            info["data_source"] = str(row.get("data_source") or self.names[self.place[0]])
        return prompt, info

    def _next(self) -> int:
        key, step = self.walk
        self.walk = [key, step + 1]
        size = len(self.numbers)
        place = step % size
        return place if self.evaluation else shuffled(place, size, f"{key} {step // size}")

    def pose(self) -> Observation:
        return self.ask(self.table[self.numbers[self.idx]])

    def describe(self) -> dict[str, Any]:
        return {"idx": self.idx}

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self.prompt = self.pose()

    @property
    def where(self) -> str:
        """The file and the row (from 1, as in editors), for messages."""
        part, row = self.place
        return f"{self.table.parts[part].source}, row {row + 1}"

    def text_of(self, row: Mapping[str, Any], key: str) -> str:
        value = row.get(key)
        if not isinstance(value, str):
            kind = "nothing" if value is None else type(value).__name__
            raise DataError(f"{self.where}: {key!r} holds {kind}, not text")
        return value

    def answers_of(self, row: Mapping[str, Any], key: str) -> Any:
        """A text, a number, or a list of them; anything else is an error that names the row."""
        value = row.get(key)
        several = value if isinstance(value, list) else [value]
        if not several or not all(isinstance(one, str) or is_gold(one) for one in several):
            raise DataError(
                f"{self.where}: {key!r} holds {str(value)[:80]!r}; an answer is a text, a number, or "
                "a list of them"
            )
        # decimals of parquet and numbers of numpy are not JSON
        plain = [one if isinstance(one, str | int | float) else str(one) for one in several]
        return plain if isinstance(value, list) else plain[0]


def num_rows(env: Any) -> int | None:
    """The rows of an environment over a table, wrapped or not; None for one that draws tasks without end."""
    inner = getattr(env, "unwrapped", env)
    return len(inner.numbers) if isinstance(getattr(inner, "table", None), RowTable) else None


def check_columns(table: RowTable, columns: Sequence[str]) -> None:
    """DataError if a table has no rows, or lacks one of these columns."""
    if not len(table):
        raise DataError(f"{table.source} is empty: it has no rows")
    for column in columns:
        if column not in table.columns:
            raise DataError(
                f"{table.source} has no column {column!r} (found: {', '.join(table.columns)}); "
                "name the ones to use: question_key=, answer_key=, test_key=, image_key="
            )


def names_of(places: Sequence[str]) -> list[str]:
    """Files as data sources: their names, or all of the text where two would have one name.

    >>> names_of(["data/aime24.parquet", "test@data/GSM-8k"]), names_of(["a/test.jsonl", "b/test.jsonl"])
    (['aime24', 'GSM-8k'], ['a/test.jsonl', 'b/test.jsonl'])
    """
    paths = [Path(parse_location(place).path) for place in places]
    names = [path.stem if path.suffix.lower() in ENDINGS else path.name for path in paths]
    return names if len(set(names)) == len(names) else [*places]


def interleaved(numbers: Sequence[Sequence[int]], sizes: Sequence[int]) -> Sequence[int]:
    """The rows of joined tables so that each table is spread evenly; within a table the order stays.

    >>> list(interleaved([range(4), range(2)], [4, 2]))  # rows 4 and 5 are the second table's
    [0, 4, 1, 2, 5, 3]
    """
    if len(numbers) == 1:
        return numbers[0]
    starts = [0, *accumulate(sizes)]
    places = [
        ((place + 0.5) / len(own), part, number + starts[part])
        for part, own in enumerate(numbers)
        for place, number in enumerate(own)
    ]
    return array("Q", (number for *_, number in sorted(places)))


def open_table(
    data: DataPlaces,
    rows: Sequence[Mapping[str, Any]] | None,
    hub: str | None,
    split: str | None,
    hub_split: str | None,
    check: bool = True,
) -> tuple[RowTable, list[bool]]:
    """The rows, and of each of their parts whether it has to be divided between train and test.

    `data` is a file, a folder, SPLIT@PATH or a dataset of the hub, or a list of these; with check=False
    a line that is no row is an error only when that row is read.
    """
    if data is None or isinstance(data, str):
        table, is_divided = open_one(data, rows, hub, split, hub_split, check)
        return table, [is_divided]
    places: Any = data
    if (
        not isinstance(places, list | tuple)
        or not places
        or not all(isinstance(p, str) for p in places)
    ):
        raise ValueError(f"data={places!r}: give a file or folder, or a list of them")
    if len(set(places)) < len(places):
        raise ValueError(f"data={places!r}: a file is listed twice, so its rows would count twice")
    opened = [open_one(place, rows, None, split, hub_split, check) for place in places]
    tables = [table for table, _ in opened]
    table = joined(tuple(tables)) if len(tables) > 1 else tables[0]
    return table, [is_divided for _, is_divided in opened]


def open_one(
    data: str | None,
    rows: Sequence[Mapping[str, Any]] | None,
    hub: str | None,
    split: str | None,
    hub_split: str | None,
    check: bool,
) -> tuple[RowTable, bool]:
    """The rows of one place, and whether they have to be divided."""
    if rows is not None:
        if data is not None:
            raise ValueError(f"rows= and data={data!r} both give the rows: keep one")
        return rows_in_memory(rows), is_to_divide(split, "rows=")
    if data is not None:
        place = parse_location(data)
        if place.split is not None:  # SPLIT@PATH: that split is all of the data
            return open_location(data, check=check), is_to_divide(split, data)
        if not place.is_hub:
            folder = Path(place.path).expanduser()
            names = list(data_files(folder)) if folder.is_dir() else []
            if not names:  # a single file is all of its data
                return read_table(place.path, check=check), is_to_divide(split, data)
            chosen, is_divided = pick(names, split, hub_split)
            return read_table(place.path, chosen, check=check), is_divided
        hub = place.path
    if hub is None:
        raise ValueError("no rows: give data= (a file or folder), rows= (a list of dicts) or hub=")
    chosen, is_divided = pick(splits_of(hub), split, hub_split)
    return read_hub(hub, chosen), is_divided


def rows_in_memory(rows: Any) -> RowTable:
    # of the datasets library: as Arrow, which knows which values it filled in
    if hasattr(rows, "with_format"):
        return RowTable(rows.with_format("arrow")[:])
    if isinstance(rows, str | Mapping):
        raise ValueError(
            f"rows= is a {type(rows).__name__}; give a list of dicts, one for each row"
        )
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise ValueError(f"rows=: row {number} is a {type(row).__name__}; each must be a dict")
    return RowTable([dict(row) for row in rows])


def is_to_divide(split: str | None, where: str) -> bool:
    """Whether data without splits has to be divided: not if `split` is None."""
    if split is not None and split not in SPLITS:
        raise ValueError(
            f"split={split!r}: {where} has no splits, so only train and test can be divided from it; leave "
            f"split out for all rows, or give a folder with a file {split}.jsonl"
        )
    return split is not None


def pick(names: Sequence[str], split: str | None, hub_split: str | None) -> tuple[str | None, bool]:
    """Which split to read, and whether to divide it.

    pick(["train"], "test", None) -> ("train", True): no test set: some rows of train are held out
    """
    if split in SPLITS and len(names) == 1 and names[0] != "test":
        return names[0], True
    if split is None and hub_split not in names and len(names) == 1:
        return names[0], False
    return split or hub_split, False


@lru_cache(maxsize=64)
def first_picture(table: RowTable) -> str | None:
    """The error of the first row that holds a picture; None if there is none."""
    if not set(COLUMNS) & set(table.columns):
        return None
    for number, row in enumerate(table.scan(), 1):
        try:
            refuse_pictures(row if isinstance(row, Mapping) else {})
        except BadField as error:
            return f"{table.source}, row {number}: {error}"
    return None


@lru_cache(maxsize=64)
def rows_of_split(table: RowTable, key: str, split: str) -> array[int]:
    """The numbers of the rows of one split, decided by the text of the question."""
    questions = (row.get(key) if isinstance(row, Mapping) else None for row in table.scan())
    chosen = (number for number, text in enumerate(questions) if split_of(str(text)) == split)
    return array("Q", chosen)


def shuffled(place: int, size: int, key: str) -> int:
    """The place that `place` goes to when 0 .. size-1 are shuffled by `key`.

    Computed for one place at a time: sixty-four walks over a million rows would otherwise need
    sixty-four lists. Four rounds of a Feistel network permute all numbers of `2 * half` bits; a number
    beyond the size is permuted again until it is inside.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        left, right = place >> half, place & ((1 << half) - 1)
        for turn in range(4):
            digest = hashlib.blake2b(f"{key} {turn} {right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") >> (64 - half))
        place = left << half | right
        if place < size:
            return place
