"""Check every row once before a run starts: which rows are bad, and why.

row 1 {"prompt": "2+3=", "reward_model": {"ground_truth": "5"}}    good
row 2 {"prompt": "", ...}                                          bad: 'prompt': has no text
row 3 {"id": 7, ...} where row 1 has the id 7 too                  bad: 'id' is that of row 1 already

Up to one row in a hundred may be bad: these are left out, counted and reported once. More bad rows stop a
run, unless `skip_bad` allows a larger share; false allows none.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from array import array
from typing import Any
from weakref import WeakKeyDictionary

from graft.data.errors import BadField, DataError, RowFault
from graft.data.layouts import RowLayout
from graft.data.tables import RowTable

log = logging.getLogger(__name__)

SPARED = 0.01
"""The share of bad rows that a run leaves out: one in 10,000 must not stop it, one in 20 should."""
DESCRIBED = 10  # bad rows that are described; the others are counted
_QUOTED = re.compile(r"`(\w+)`|'(\w+)'")


class Repeats:
    """Which texts occur in more than one row. A text costs 12 bytes, since a file may have millions.

    rows 1, 2, 3 with "a", "b", "a": repeated() is [(3, 1)]
    """

    def __init__(self) -> None:
        self.digests: array[int] = array("Q")
        self.rows: array[int] = array("I")

    def add(self, text: str, row: int) -> None:
        self.digests.append(digest(text))
        self.rows.append(row)

    def repeated(self) -> list[tuple[int, int]]:
        """(row, the first row with the same text), for every row after that first one."""
        if not self.digests:
            return []
        import numpy as np

        seen = np.frombuffer(self.digests, dtype=np.uint64)
        ordered = np.sort(seen)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        twice = twice[np.append(True, twice[1:] != twice[:-1])] if len(twice) else twice
        del ordered
        firsts: dict[int, int] = {}
        found: list[tuple[int, int]] = []
        for start in range(0, len(seen) if len(twice) else 0, 1 << 20):  # a piece at a time
            part = seen[start : start + (1 << 20)]
            at = np.minimum(np.searchsorted(twice, part), len(twice) - 1)
            for offset in np.flatnonzero(twice[at] == part):
                row = self.rows[start + int(offset)]
                first = firsts.setdefault(int(part[offset]), row)
                if first != row:
                    found.append((row, first))
        return found


def id_of(row: Any) -> str | None:
    """The row's id; an empty value, which pandas turns into NaN, is no id."""
    value = row.get("id")
    return str(value) if isinstance(value, str | int) and value != "" else None


def repeated_id(row: int, first: int) -> RowFault:
    return RowFault(
        row,
        "id",
        f"'id' is that of row {first} already; remove one of the two rows, or change the id",
    )


def digest(text: str) -> int:
    """A hash of 8 bytes: two of ten million different texts collide in one file of 300,000."""
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class Verdict:
    """The bad rows of a table: their numbers from 0, and a description of the first ten."""

    def __init__(self) -> None:
        self.bad: array[int] = array("Q")
        self.faults: list[RowFault] = []
        self.unanswered = 0
        """Good tasks without a right answer, which only the user's own reward can grade."""
        self.is_reported = False

    def add(self, fault: RowFault) -> None:
        self.bad.append(fault.row - 1)
        if len(self.faults) < DESCRIBED:
            self.faults.append(fault)

    def good(self, numbers: Any) -> Any:
        """The numbers of good rows among these."""
        if not self.bad:
            return numbers
        bad = set(self.bad)
        return array("Q", (number for number in numbers if number not in bad))


def read_row(layout: RowLayout, purpose: str, row: Any, number: int) -> Any:
    """The TaskRow or ChatRow that row `number` is, or the RowFault that it has."""
    read = layout.chat if purpose == "chat" else layout.task
    assert read is not None, f"layout {layout.name} has no reader for {purpose}"
    if isinstance(row, DataError):  # it already names the file and the row
        return RowFault(number, "", str(row))
    try:
        return read(row)
    except BadField as error:
        return RowFault(number, error.field, str(error))
    except ValueError as error:
        named = _QUOTED.match(str(error))
        field = (named[1] or named[2]) if named else next(iter(layout.prompt_columns), "")
        return RowFault(number, field, str(error))


_verdicts: WeakKeyDictionary[RowTable, dict[tuple[str, str], Verdict]] = WeakKeyDictionary()
_checking = threading.Lock()


def check(
    table: RowTable, layout: RowLayout, purpose: str, skip_bad: bool | float = SPARED
) -> Verdict:
    """The bad rows of a table, found once; DataError if their share is above `skip_bad`."""
    if not 0 <= skip_bad <= 1:
        raise DataError(f"{skip_bad=}: must be a share from 0 to 1, true (any number) or false")
    with _checking:  # many envs may open one file: the first one checks it
        known = _verdicts.setdefault(table, {})
        key = (f"{layout.name} {layout.columns}", purpose)
        if key not in known:
            known[key] = _check(table, layout, purpose)
        verdict = known[key]
        if not is_spared(len(verdict.bad), len(table), skip_bad):
            raise DataError(refusal(table.source, verdict, len(table), purpose))
        if verdict.bad and not verdict.is_reported:
            verdict.is_reported = True
            log.warning(
                f"{table.source}: {len(verdict.bad):,} of {len(table):,} rows are bad and left out; the "
                f"first: {described(table.source, verdict.faults[0])}"
            )
    return verdict


def is_spared(bad: int, rows: int, skip_bad: bool | float) -> bool:
    """Whether a run may leave out this number of bad rows and continue.

    >>> is_spared(1, 10_000, SPARED), is_spared(1, 20, SPARED), is_spared(19, 20, True)
    (True, False, True)
    """
    return not bad or (bad <= skip_bad * rows and bad < rows)


def _check(table: RowTable, layout: RowLayout, purpose: str) -> Verdict:
    verdict, ids = Verdict(), Repeats()
    for number, row in enumerate(table.scan(), 1):
        found = read_row(layout, purpose, row, number)
        if isinstance(found, RowFault):
            verdict.add(found)
            continue
        verdict.unanswered += purpose == "task" and found.answer is None
        if (name := id_of(row)) is not None:
            ids.add(name, number)
    for number, first in ids.repeated():  # the first row with an id is good
        verdict.add(repeated_id(number, first))
    verdict.faults.sort()
    return verdict


def described(source: str, fault: RowFault) -> str:
    """A fault in one line: "a.jsonl, row 7: 'prompt': has no text"."""
    is_complete = not fault.field and source in fault.why
    return fault.why if is_complete else f"{source}, row {fault.row}: {fault.why}"


RECIPE_KEYS = {"task": "task.args.skip_bad", "chat": "sft.skip_bad"}


def refusal(source: str, verdict: Verdict, size: int, purpose: str) -> str:
    first = described(source, verdict.faults[0])
    bad = len(verdict.bad)
    if bad == size:
        return f"{first} (all {size:,} rows are bad)" if size > 1 else first
    if bad == 1:
        why = f"{size - 1:,} of {size:,} rows are fine; skip_bad=true leaves this one out"
    else:
        why = f"{bad:,} of {size:,} rows are bad; `graft data show` lists them, skip_bad=true leaves them out"
    return f"{first} ({why}; in a recipe {RECIPE_KEYS[purpose]}=true)"
