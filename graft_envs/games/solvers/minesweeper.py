"""How likely a mine is under each hidden cell, from what an open board shows.

    .  .  1      The 1 in the corner has one hidden neighbour: a mine. So the 1 in the middle, which
    1  1  1      has it as a neighbour too, is satisfied, and the first cell is safe.
    0  0  0

First such single digits are applied. If they give nothing, all placements of mines next to open cells
are counted, each weighted by the number of ways to place the remaining mines elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import comb
from typing import NamedTuple

MAX_PLACEMENTS = 20_000
"""Steps of counting for one area, before it is estimated instead."""
MAX_GROUPS = 60
"""Most kinds of cells in one count, which recurses once per kind."""


class Digit(NamedTuple):
    """Hidden cells around an open one, and the mines among them."""

    cells: frozenset[int]
    mines: int


def risks(
    cells: Sequence[str], around: Sequence[Sequence[int]], num_mines: int
) -> dict[int, float]:
    """The probability of a mine in each hidden cell: 0.0 if it is safe, 1.0 if it is certain.

    Every cell that is not a digit counts as hidden, also a flag. If single digits determine a safe
    cell, only the cells that they determine are in the result.
    """
    hidden = {cell for cell, shown in enumerate(cells) if not shown.isdigit()}
    digits = [
        Digit(frozenset(others), int(shown))
        for cell, shown in enumerate(cells)
        if shown.isdigit() and (others := hidden.intersection(around[cell]))
    ]
    known = follow(digits)
    if 0.0 in known.values():
        return known
    return count_ways(digits, known, hidden, num_mines)


def follow(digits: Sequence[Digit]) -> dict[int, float]:
    """What single digits determine: all unknown cells of a digit are mines, or none is."""
    known: dict[int, float] = {}
    while True:
        before = len(known)
        for cells, mines in digits:
            unknown = [cell for cell in cells if cell not in known]
            left = mines - sum(known.get(cell) == 1.0 for cell in cells)
            if left in (0, len(unknown)):
                known.update(dict.fromkeys(unknown, 1.0 if left else 0.0))
        if len(known) == before:
            return known


class MinePlacements(NamedTuple):
    """The number of placements of mines in one area, by their number of mines."""

    total: dict[int, int]
    mined: dict[int, dict[int, int]]
    """Per cell the number of placements with a mine in it."""


def count_ways(
    digits: Sequence[Digit], known: Mapping[int, float], hidden: set[int], num_mines: int
) -> dict[int, float]:
    """The probabilities when only some mines are known."""
    left = num_mines - len(known)
    reduced = {
        Digit(digit.cells.difference(known), digit.mines - len(digit.cells.intersection(known)))
        for digit in digits
    }
    digits = sorted((digit for digit in reduced if digit.cells), key=lambda d: sorted(d.cells))
    apart = hidden.difference(known, *[digit.cells for digit in digits])
    areas = [place_mines(area) for area in split(digits)]
    counted = [area for area in areas if area is not None]
    totals = [area.total for area in counted]
    every = fitting(totals, left, len(apart))
    if len(counted) < len(areas) or not every:  # too many to count, or a contradictory board
        return {**known, **estimate(digits, apart, left)}
    found = dict(known)
    for number, area in enumerate(counted):
        others = totals[:number] + totals[number + 1 :]
        for cell, mined in area.mined.items():
            found[cell] = fitting([*others, mined], left, len(apart)) / every
    if apart:
        inside = fitting(totals, left - 1, len(apart) - 1) / every  # with a mine in one such cell
        found.update(dict.fromkeys(sorted(apart), inside))
    return found


def fitting(totals: Sequence[Mapping[int, int]], num_mines: int, num_apart: int) -> int:
    """Placements of the mines, some in each area and the rest in `num_apart` other cells."""
    ways = {0: 1}
    for total in totals:
        ways = convolve(ways, total)
    return sum(many * comb(num_apart, num_mines - n) for n, many in ways.items() if n <= num_mines)


def convolve(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    """Two areas together: {0: 1, 1: 2} and {1: 3} -> {1: 3, 2: 6}."""
    both: dict[int, int] = {}
    for n, many in one.items():
        for m, more in other.items():
            both[n + m] = both.get(n + m, 0) + many * more
    return both


def split(digits: Sequence[Digit]) -> Iterator[list[Digit]]:
    """Areas: digits that share hidden cells, directly or through others."""
    rest = list(digits)
    while rest:
        area, cells = [rest.pop(0)], set[int]()
        for digit in area:  # grows while it is walked
            cells |= digit.cells
            area += [other for other in rest if cells & other.cells]
            rest = [other for other in rest if not cells & other.cells]
        yield area


def place_mines(area: Sequence[Digit]) -> MinePlacements | None:
    """All placements that satisfy the digits of an area; None: too many to count.

    Cells with the same neighbouring digits are one kind: of 3 such cells 2 hold a mine in 3 ways, and each
    of them in 2.
    """
    kinds: dict[tuple[int, ...], list[int]] = {}
    for cell in sorted(frozenset[int]().union(*[digit.cells for digit in area])):
        seen_by = tuple(n for n, digit in enumerate(area) if cell in digit.cells)
        kinds.setdefault(seen_by, []).append(cell)
    if len(kinds) > MAX_GROUPS:
        return None
    groups = list(kinds.items())
    wanted = [digit.mines for digit in area]
    cells_left = [len(digit.cells) for digit in area]
    ways = MinePlacements({}, {cell: {} for cells in kinds.values() for cell in cells})
    chosen: list[int] = []
    steps = 0

    def go_on(number: int, many: int) -> bool:
        """Try all numbers of mines for this kind; False if that took too many steps."""
        nonlocal steps
        steps += 1
        if number == len(groups):
            record(ways, groups, chosen, many)
            return True
        seen_by, cells = groups[number]
        for digit in seen_by:
            cells_left[digit] -= len(cells)
        most = min(len(cells), *[wanted[digit] for digit in seen_by])
        least = max(0, *[wanted[digit] - cells_left[digit] for digit in seen_by])
        is_done = True
        for mines in range(least, most + 1):
            for digit in seen_by:
                wanted[digit] -= mines
            chosen.append(mines)
            is_done = go_on(number + 1, many * comb(len(cells), mines))
            chosen.pop()
            for digit in seen_by:
                wanted[digit] += mines
            if not is_done:
                break
        for digit in seen_by:
            cells_left[digit] += len(cells)
        return is_done and steps <= MAX_PLACEMENTS

    return ways if go_on(0, 1) else None


def record(
    ways: MinePlacements,
    groups: Sequence[tuple[tuple[int, ...], list[int]]],
    chosen: list[int],
    many: int,
) -> None:
    total = sum(chosen)
    ways.total[total] = ways.total.get(total, 0) + many
    for (_, cells), mines in zip(groups, chosen, strict=True):
        if mines:  # of comb(n, k) choices a share k / n contains a given cell
            share = many * mines // len(cells)
            for cell in cells:
                ways.mined[cell][total] = ways.mined[cell].get(total, 0) + share


def estimate(digits: Sequence[Digit], apart: set[int], left: int) -> dict[int, float]:
    """Estimate without counting: the highest density of a neighbouring digit, the average elsewhere.

    Never 0 or 1, because nothing is certain.
    """
    num_cells = len(apart.union(*[digit.cells for digit in digits]))
    found = dict.fromkeys(sorted(apart), min(0.99, max(0.01, left / max(1, num_cells))))
    for cells, mines in digits:
        for cell in sorted(cells):
            found[cell] = max(found.get(cell, 0.01), min(0.99, mines / len(cells)))
    return found
