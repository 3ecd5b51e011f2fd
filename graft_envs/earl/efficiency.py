"""The fewest comparisons and swaps that sort, and the efficiency of using more.

comparisons of 2, 3, 4, 5 items    least 1, 3, 5, 7           efficiency 0 from 2, 6, 8, 15 on
swaps                              least items - cycles       efficiency 0 from n (n - 1) / 2 on
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence


def least_compares(n: int) -> int:
    """ceil(log2 n!), below which no method determines the order: 1, 3, 5, 7 for 2..5 items."""
    return (math.factorial(n) - 1).bit_length()


def reference_compares(n: int) -> int:
    """n ceil(log2 n), from which on the efficiency is 0: 2, 6, 8, 15 for 2..5 items."""
    return max(least_compares(n), n * (n - 1).bit_length())


def least_swaps(start: Sequence[str], target: Sequence[str]) -> int:
    """Items minus cycles of the permutation: "BAC" to "ABC" is one swap, "BCA" to "ABC" two."""
    position = {symbol: place for place, symbol in enumerate(target)}
    goes_to = [position[symbol] for symbol in start]
    seen: set[int] = set()
    cycles = 0
    for place in range(len(start)):
        cycles += place not in seen
        while place not in seen:
            seen.add(place)
            place = goes_to[place]
    return len(start) - cycles


def reference_swaps(n: int, least: int) -> int:
    """n (n - 1) / 2, the most that a bubble sort takes, but always above the least."""
    return max(least + 1, n * (n - 1) // 2)


def linear_efficiency(used: int, least: int, reference: int) -> float:
    """1 at the least possible number, 0 from the reference on, linear in between."""
    return 1.0 - min(1.0, max(0.0, (used - least) / max(1, reference - least)))


def sort_efficiency(n: int, compares: int, swaps: int, least: int) -> float:
    """Half for few comparisons, half for few swaps; 0 if the comparisons cannot determine the order.

    4 items one swap away from sorted (references 8 and 6), 6 comparisons and 2 swaps:
    (1 - 1/3) / 2 + (1 - 1/5) / 2 = 0.7333
    """
    if compares < least_compares(n):
        return 0.0
    by_compares = linear_efficiency(compares, least_compares(n), reference_compares(n))
    return (by_compares + order_efficiency(n, swaps, least)) / 2


def order_efficiency(n: int, swaps: int, least: int) -> float:
    return linear_efficiency(swaps, least, reference_swaps(n, least))


def sort_by_comparing(symbols: Sequence[str], is_less: Callable[[str, str], bool]) -> list[str]:
    """The symbols in ascending order, found with exactly `least_compares` questions.

    Each compares the pair that splits the possible orders most evenly; for up to five items that needs
    no more than the least number. Where fewer happen to suffice, the first pair is compared again,
    because the reward demands the least number.
    """
    possible = list(itertools.permutations(symbols))
    pairs = list(itertools.combinations(symbols, 2))
    compared: list[tuple[str, str]] = []
    while len(possible) > 1:
        a, b = min(
            pairs,
            key=lambda pair: abs(
                2 * sum(o.index(pair[0]) < o.index(pair[1]) for o in possible) - len(possible)
            ),
        )
        compared.append((a, b))
        answer = is_less(a, b)
        possible = [o for o in possible if (o.index(a) < o.index(b)) == answer]
    for _ in range(least_compares(len(symbols)) - len(compared)):
        is_less(*compared[0])
    return list(possible[0])
