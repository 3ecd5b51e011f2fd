"""Every row looked at once, before a run starts: what is bad, and why.

row 1 {"prompt": "2+3=", "reward_model": {"ground_truth": "5"}}    good
row 2 {"prompt": "", ...}                                          bad: 'prompt': there is not a word in it
row 3 {"id": 7, ...} where row 1 has the id 7 too                  bad: 'id' 7 stands in row 1 already

Up to one row in a hundred may be bad: they are left out, counted, and said once. More of them stop a run,
unless `skip_bad` allows a larger share; false allows none.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from array import array
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from graft.data.errors import BadField, DataError, Fault
from graft.data.schemas import RowLayout
from graft.data.tables import RowTable

log = logging.getLogger(__name__)

SPARED = 0.01
"""The share of bad rows that a run leaves out: one of 10,000 shall not stop it, one of 20 should."""
TOLD = 10  # bad rows that are described; the others are counted
_QUOTED = re.compile(r"`(\w+)`|'(\w+)'")


class Repeats:
    """Which texts stand in more than one row. A text costs 12 bytes: a file may have millions of them.

    rows 1, 2, 3 with "a", "b", "a": repeated() is [(3, 1)]
    """

    def __init__(self) -> None:
        self.digests: array[int] = array("Q")
        self.rows: array[int] = array("I")

    def add(self, text: str, row: int) -> None:
        self.digests.append(digest(text))
        self.rows.append(row)

    def repeated(self) -> list[tuple[int, int]]:
        """(row, the first row that says the same), for every row after the first."""
        if not self.digests:
            return []
        seen = np.frombuffer(self.digests, dtype=np.uint64)
        ordered = np.sort(seen)
        twice = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
        del ordered
        firsts: dict[int, int] = {}
        found: list[tuple[int, int]] = []
        for start in range(0, len(seen) if len(twice) else 0, 1 << 20):  # not all places at once
            part = seen[start : start + (1 << 20)]
            at = np.minimum(np.searchsorted(twice, part), len(twice) - 1)
            for place in np.flatnonzero(twice[at] == part):
                row = self.rows[start + int(place)]
                first = firsts.setdefault(int(part[place]), row)
                if first != row:
                    found.append((row, first))
        return found


def id_of(row: Any) -> str | None:
    """What the row calls itself; an empty cell, which pandas makes a NaN of, is no name."""
    value = row.get("id")
    return str(value) if isinstance(value, str | int) and value != "" else None


def same_id(row: int, first: int) -> Fault:
    return Fault(
        row,
        "id",
        f"'id' is that of row {first} already; take one of the two out, or give it an id of its own",
    )


def digest(text: str) -> int:
    """A text in 8 bytes: among ten million texts two that differ agree once in 300,000 files."""
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def fault_of(error: Exception, number: int, layout: RowLayout) -> Fault:
    """An error about a row as a fault; a DataError says the file and the row itself."""
    text = str(error)
    if isinstance(error, DataError):
        return Fault(number, "", text)
    if isinstance(error, BadField):
        return Fault(number, error.field, text)
    named = _QUOTED.match(text)
    field = (named[1] or named[2]) if named else layout.asks[0] if layout.asks else ""
    return Fault(number, field, text)


class Verdict:
    """What was found in a table: the numbers of bad rows from 0, and the first ten in words."""

    def __init__(self) -> None:
        self.bad: array[int] = array("Q")
        self.faults: list[Fault] = []
        self.unanswered = 0
        """Good tasks without a right answer, which only a reward of the user's can grade."""
        self.is_said = False

    def add(self, fault: Fault) -> None:
        self.bad.append(fault.row - 1)
        if len(self.faults) < TOLD:
            self.faults.append(fault)

    def add_repeated(self, ids: Repeats) -> None:
        """Rows whose id was there before; the first one with it is good."""
        for row, first in ids.repeated():
            self.add(same_id(row, first))
        self.faults.sort()

    def good(self, numbers: Any) -> Any:
        """Of these numbers those of good rows."""
        if not self.bad:
            return numbers
        bad = set(self.bad)
        return array("Q", (number for number in numbers if number not in bad))


def look(
    rows: Iterator[Any], layout: RowLayout, read: Callable[[Any], Any]
) -> Iterator[tuple[int, Any, Any, Fault | None]]:
    """Each row with its number from 1 and what `read` makes of it, or the fault that it has."""
    for number, row in enumerate(rows, 1):
        if isinstance(row, DataError):
            yield number, None, None, fault_of(row, number, layout)
            continue
        try:
            yield number, row, read(row), None
        except ValueError as error:
            yield number, row, None, fault_of(error, number, layout)


_verdicts: WeakKeyDictionary[RowTable, dict[tuple[str, str], Verdict]] = WeakKeyDictionary()
_checking = threading.Lock()


def check(
    table: RowTable, layout: RowLayout, purpose: str, skip_bad: bool | float = SPARED
) -> Verdict:
    """What is bad in a table; DataError if that is more than the share `skip_bad`. Looked for once."""
    with _checking:  # sixty-four envs of one file: the first one looks
        known = _verdicts.setdefault(table, {})
        key = (f"{layout.name} {layout.says}", purpose)
        if key not in known:
            known[key] = _look_at(table, layout, purpose)
        verdict = known[key]
        if not is_spared(len(verdict.bad), len(table), skip_bad):
            raise DataError(refusal(table.source, verdict, len(table)))
        if verdict.bad and not verdict.is_said:
            verdict.is_said = True
            log.warning("%s", skipped(table, verdict))
    return verdict


def is_spared(bad: int, rows: int, skip_bad: bool | float) -> bool:
    """Whether a run may leave so many rows out and go on.

    >>> is_spared(1, 10_000, SPARED), is_spared(1, 20, SPARED), is_spared(19, 20, True)
    (True, False, True)
    """
    return not bad or (bad <= skip_bad * rows and bad < rows)


def _look_at(table: RowTable, layout: RowLayout, purpose: str) -> Verdict:
    read = layout.chat if purpose == "chat" else layout.task
    assert read is not None, f"layout {layout.name} was recognised for something else"
    verdict, ids = Verdict(), Repeats()
    for number, row, found, fault in look(table.scan(), layout, read):
        if fault is not None:
            verdict.add(fault)
            continue
        verdict.unanswered += purpose == "task" and found.answer is None
        if (name := id_of(row)) is not None:
            ids.add(name, number)
    verdict.add_repeated(ids)
    return verdict


def told(source: str, fault: Fault) -> str:
    """A fault on a line: "a.jsonl, row 7: 'prompt': there is not a word in it"."""
    return (
        fault.why
        if not fault.field and source in fault.why
        else f"{source}, row {fault.row}: {fault.why}"
    )


def refusal(source: str, verdict: Verdict, size: int) -> str:
    first = told(source, verdict.faults[0])
    if len(verdict.bad) == size:
        return f"{first} (and so are all {size:,} rows bad)" if size > 1 else first
    if len(verdict.bad) == 1:
        return (
            f"{first} ({size - 1:,} of {size:,} rows are fine; skip_bad=true leaves this one out)"
        )
    return (
        f"{first} ({len(verdict.bad):,} of {size:,} rows are bad; `graft data show` lists them, "
        "skip_bad=true leaves them out)"
    )


def skipped(table: RowTable, verdict: Verdict) -> str:
    return (
        f"{table.source}: {len(verdict.bad):,} of {len(table):,} rows are bad and left out; the first: "
        f"{told(table.source, verdict.faults[0])}"
    )
