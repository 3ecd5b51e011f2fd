r"""Compare two parsed answers: equal, different, or undecided.

0.5 and 1/2                     yes
\sqrt{3} and 2\sqrt{3}          no: values that certainly differ
\sqrt{12} and 2\sqrt{3}         None: values that agree within their errors
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from graft.rewards.maths.ball_arithmetic import Unreadable, Value, as_ball, differ
from graft.rewards.maths.formulas import Formula
from graft.rewards.maths.reading import Number, Reading, Several, Words

PLACES = 6  # decimals that a rounded number must have right, as math-verify counts
SLACK = 2e-6  # a larger difference is not a rounding error
CLOSE = 10_000  # nor is one above this fraction (1/CLOSE) of the number itself


def compare(a: Reading, b: Reading) -> bool | None:
    """True or False where that is certain, else None."""
    if isinstance(a, Words) and isinstance(b, Words):
        # abc and cab may be words, but also the same product
        is_product = len(a.text) < 5 and sorted(a.text) == sorted(b.text)
        return a == b or (None if is_product else False)
    if isinstance(a, Several) and isinstance(b, Several):
        return _compare_several(a, b)
    if isinstance(a, Words) or isinstance(b, Words):
        return False if isinstance(a, Number) or isinstance(b, Number) else None
    if isinstance(a, Several) or isinstance(b, Several):
        several = a if isinstance(a, Several) else b
        # "3,14" may be a decimal; three parts are not a single value
        return False if isinstance(several, Several) and len(several.items) > 2 else None
    if isinstance(a, Number) and isinstance(b, Number):
        return equal_numbers(a, b)
    try:
        return _compare_formulas(_as_formula(a), _as_formula(b))
    except Unreadable:
        return None


def equal_numbers(a: Number, b: Number) -> bool:
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
    is_close = abs(a.value - b.value) <= max(abs(a.value), abs(b.value)) / CLOSE
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
    for x, y in zip(first, second, strict=True):
        if differ(x, y, _slack(x, y) if has_decimals else 0.0):
            return False
    if length == 1 and isinstance(first[0], Fraction) and first[0] == second[0]:
        return True
    return None  # they agree at the tested points, or nearly


def _slack(a: Value, b: Value) -> float:
    """The allowed distance of two decimals, relative for small ones: 1.6e-19 is not 1.7e-19."""
    return min(SLACK, max(abs(as_ball(a).mid), abs(as_ball(b).mid)) / CLOSE)


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
    verdicts = [compare(x, y) for x, y in zip(first, second, strict=True)]
    if False in verdicts:
        return False
    return True if all(verdicts) and a.brackets == b.brackets else None


def _in_order(items: Sequence[Number | Formula]) -> tuple[Number | Formula, ...]:
    """Sorted by value; Unreadable for sets with repeated or variable members."""
    formulas = [_as_formula(item) for item in items]
    if any(len(formula.values) > 1 for formula in formulas):
        raise Unreadable("no order")
    mids = [as_ball(formula.values[0]).mid for formula in formulas]
    order = sorted(range(len(items)), key=mids.__getitem__)
    gaps = [mids[after] - mids[before] for before, after in pairwise(order)]
    if any(gap < 1e-5 for gap in gaps):
        raise Unreadable("no strict order")
    return tuple(items[index] for index in order)
