r"""Is a mathematical answer right? Decided at once where that is certain, else by math-verify.

    "1,200" and "1200"             equal once both are tidied: right, in microseconds
    "\frac{2}{4}" and "0.5"        exact numbers: right
    "2\sqrt{3}" and "\sqrt{3}"     values that certainly differ: wrong
    "\sqrt{12}" and "2\sqrt{3}"    values that agree: math-verify has the last word

Most wrong answers are decided here; what is left goes to a pool of processes that are ended when
they take longer than the limit. An answer that cannot be decided in time is wrong.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from graft.rewards.balls import Unreadable, as_ball, differ
from graft.rewards.formulas import Formula
from graft.rewards.reading import Number, Reading, Several, Words, read, tidy
from graft.rewards.symbolic import MAX_LENGTH, is_readable, math_equal
from graft.rewards.workers import NoWorkers, WorkerError, Workers

PLACES = 6  # decimals that a rounded number must have right, as math-verify counts
SLACK = 2e-6  # a larger difference is one, however numbers were rounded
MAX_TIDY = 2000  # characters; a longer text is only compared as it stands

WORKERS = Workers("graft.rewards.symbolic:warm")
_alone = threading.Lock()


def grade(answer: str, golds: str | Sequence[str], *, timeout: float = 1.0) -> bool:
    r"""True if `answer` means the same as `golds`, or as one of them.

    >>> grade(r"\frac{1}{2}", ["0.25", "0.5"])
    True

    Safe on any thread. `timeout` is in seconds and for each gold that has to be worked out.
    """
    undecided: list[str] = []
    for gold in [golds] if isinstance(golds, str) else golds:
        verdict = decide(answer, gold)
        if verdict:
            return True
        if verdict is None:
            undecided.append(gold)
    return any(_work_out(answer, gold, timeout) for gold in undecided)


def _work_out(answer: str, gold: str, timeout: float) -> bool:
    if not (is_readable(answer) and is_readable(gold)):
        return False
    try:
        return WORKERS.call("graft.rewards.symbolic:math_equal", answer, gold, timeout=timeout)
    except NoWorkers:
        with _alone:  # no processes here: the bounds in `symbolic` are all the protection there is
            return math_equal(answer, gold)
    except WorkerError:  # took too long, used too much memory: not an answer
        return False


def decide(answer: str, gold: str) -> bool | None:
    """Right or wrong, where that can be told without algebra; else None.

    >>> decide("1,200", "1200"), decide("3", "4"), decide("x + x", "2x")
    (True, False, None)
    """
    if len(answer) > MAX_TIDY or len(gold) > MAX_TIDY:
        return answer.strip() == gold.strip()
    answer, gold = tidy(answer), tidy(gold)
    if not answer or not gold:
        return False
    if answer == gold:
        return True
    if max(len(answer), len(gold)) > MAX_LENGTH:
        return None if len(answer) <= MAX_LENGTH else False
    answer, gold = _without_assignment(answer, gold)
    first, second = read(answer), read(gold)
    if first is None or second is None:
        return None
    return _compare(first, second)


_ASSIGNMENT = re.compile(r"[A-Za-z]=([^=<>]+)")


def _without_assignment(answer: str, gold: str) -> tuple[str, str]:
    """ "x=5" and "5" -> "5" and "5"; two assignments stay as they are: x=5 is not y=5."""
    first, second = _ASSIGNMENT.fullmatch(answer), _ASSIGNMENT.fullmatch(gold)
    if first and not second and "=" not in gold:
        return first[1].strip(), gold
    if second and not first and "=" not in answer:
        return answer, second[1].strip()
    return answer, gold


def _compare(a: Reading, b: Reading) -> bool | None:
    if isinstance(a, Words) and isinstance(b, Words):
        # abc and cab may be words, but also the same product
        return a == b or (None if sorted(a.text) == sorted(b.text) else False)
    if isinstance(a, Several) and isinstance(b, Several):
        return _compare_several(a, b)
    if isinstance(a, Words) or isinstance(b, Words):
        return False if isinstance(a, Number) or isinstance(b, Number) else None
    if isinstance(a, Several) or isinstance(b, Several):
        several = a if isinstance(a, Several) else b
        # "3,14" may be a decimal; what has three parts is not a single value
        return False if isinstance(several, Several) and len(several.items) > 2 else None
    if isinstance(a, Number) and isinstance(b, Number):
        return same_number(a, b)
    try:
        return _compare_formulas(_as_formula(a), _as_formula(b))
    except Unreadable:
        return None


def same_number(a: Number, b: Number) -> bool:
    """Equal, or equal to six places where one is rounded; 12% is 0.12 and 12.

    0.333333 is 1/3 written down; 1.0000001 is not 1, and 0.0000001 is not 0.0000002.
    """
    if a.is_percent != b.is_percent:
        percent, plain = (a, b) if a.is_percent else (b, a)
        return plain.value in (percent.value, percent.value / 100)
    if a.value == b.value:
        return True
    if not (a.is_decimal and b.is_decimal):  # one is a whole number, and that is exact
        return False
    is_close = abs(a.value - b.value) <= max(abs(a.value), abs(b.value)) / 10_000
    return is_close and round(a.value, PLACES) == round(b.value, PLACES)


def _as_formula(one: Number | Formula) -> Formula:
    if isinstance(one, Formula):
        return one
    if one.is_percent:
        raise Unreadable("per cent of what")
    return Formula((one.value,), one.is_decimal)


def _compare_formulas(a: Formula, b: Formula) -> bool | None:
    length = max(len(a.values), len(b.values))
    first, second = (f.values * (length // len(f.values)) for f in (a, b))
    has_decimals = a.has_decimals or b.has_decimals
    tolerance = SLACK if has_decimals else 0.0
    if any(differ(x, y, tolerance) for x, y in zip(first, second, strict=True)):
        return False
    if length == 1 and isinstance(first[0], Fraction) and first[0] == second[0]:
        return True
    return None  # they agree where we looked, or nearly so


def _compare_several(a: Several, b: Several) -> bool | None:
    """Item by item; sets and bare lists by size first. Intervals and pairs look alike: (1, 2]."""
    if len(a.items) != len(b.items) or a.has_order != b.has_order:
        return None
    first, second = a.items, b.items
    try:
        if not a.has_order:
            first, second = _in_order(first), _in_order(second)
    except Unreadable:
        return None
    verdicts = [_compare(x, y) for x, y in zip(first, second, strict=True)]
    if False in verdicts:
        return False
    return True if all(verdicts) and a.brackets == b.brackets else None


def _in_order(items: Sequence[Number | Formula]) -> tuple[Number | Formula, ...]:
    """Sorted by value; sets with repeated or variable members are left to others."""
    formulas = [_as_formula(item) for item in items]
    if any(len(formula.values) > 1 for formula in formulas):
        raise Unreadable("no order")
    mids = [as_ball(formula.values[0]).mid for formula in formulas]
    order = sorted(range(len(items)), key=mids.__getitem__)
    gaps = [mids[after] - mids[before] for before, after in pairwise(order)]
    if any(gap < 1e-5 for gap in gaps):
        raise Unreadable("no strict order")
    return tuple(items[index] for index in order)
