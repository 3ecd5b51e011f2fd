"""EARL's sets of sorting tasks: what they draw, the facts that determine an order, their texts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graft.tools.sorting import SYMBOLS, SortingSyntax

TASK_TOOLS = {"sort": ("compare", "swap"), "order": ("swap",), "compare": ("compare",)}
"""The tools that each task needs, and offers by default."""


class SortingSet(NamedTuple):
    """The original's number of rows; tasks and numbers of items, each with its weight."""

    rows: int
    tasks: Mapping[str, float]
    counts: Mapping[int, float]


_ORDER_COUNTS = {2: 0.3, 3: 0.3, 4: 0.2, 5: 0.2}
_SORT_4 = SortingSet(2_000, {"sort": 1.0}, {4: 1.0})
_SORT_4_5 = SortingSet(2_000, {"sort": 1.0}, {4: 0.5, 5: 0.5})

SETS: dict[str, dict[str, SortingSet]] = {
    "order": {
        "train": SortingSet(20_000, {"order": 0.95, "compare": 0.05}, _ORDER_COUNTS),
        "test": SortingSet(2_000, {"order": 1.0}, _ORDER_COUNTS),
    },
    "sort": {
        "train": SortingSet(80_000, {"sort": 1.0}, {2: 0.1, 3: 0.2, 4: 0.3, 5: 0.4}),
        "test": _SORT_4_5,
    },
    "sort-4": {"train": _SORT_4, "test": _SORT_4},
    "sort-4-5": {"train": _SORT_4_5, "test": _SORT_4_5},
    "compare": {
        "train": SortingSet(10_000, {"compare": 1.0}, {2: 1.0}),
        "test": SortingSet(1_000, {"compare": 1.0}, {2: 1.0}),
    },
}


def all_permutations(n: int) -> list[list[int]]:
    """Every order of the values 0..n-1, in ascending order: 24 for four items.

    A script can test a policy on all of them:
    [make("earl:sort-4", items=items, reverse=False) for items in all_permutations(4)]
    """
    return [list(items) for items in itertools.permutations(range(n))]


def draw_facts(rng: random.Random, items: Sequence[int]) -> list[str]:
    """Relations that fix the order of the items, and up to n - 2 more that follow from them.

    Items 2, 0, 1 behind A, B, C -> ["C > B", "C < A"], or with "A > B" as well; shuffled, and each
    either way round.
    """
    n = len(items)
    ascending = sorted(range(n), key=items.__getitem__)
    pairs = list(itertools.combinations(ascending, 2))
    needed = list(itertools.pairwise(ascending))
    others = [pair for pair in pairs if pair not in needed]
    chosen = needed + rng.sample(others, rng.randint(0, n - 2))
    rng.shuffle(chosen)
    return [
        f"{SYMBOLS[low]} < {SYMBOLS[high]}"
        if rng.random() < 0.5
        else f"{SYMBOLS[high]} > {SYMBOLS[low]}"
        for low, high in chosen
    ]


PURPOSES = {
    "compare": "how two items relate",
    "swap": "exchange two items; shows the new order",
    "check": "whether an item is negative, positive, even or odd",
}
EXAMPLES = {
    "compare": ("A", "B", "A > B"),
    "swap": ("A", "B", "B, A"),
    "check": ("A", "even", "True"),
}
"""Tool -> two arguments and the result of a call, as the prompt shows them."""


def system_text(tools: Sequence[str], syntax: SortingSyntax) -> str:
    how = " by their keywords" if syntax.is_bare else ""
    return "\n".join(
        [
            "You are a helpful assistant. You think about the task first and then solve it. "
            f"You may use these tools{how}, as often as you like; what comes after the call is "
            "the tool's answer:",
            *(f"- {PURPOSES[tool]}: {syntax.example(tool, *EXAMPLES[tool])}" for tool in tools),
        ]
    )


def compare_question(order: Sequence[str], pair: Sequence[str]) -> str:
    return (
        f"The items {', '.join(order)} have hidden values. How do {pair[0]} and {pair[1]} "
        "compare? Use the tool once, then answer in <answer> </answer> tags, for example "
        "<answer> A > B </answer>."
    )


def sort_question(
    order: Sequence[str], facts: Sequence[str], is_descending: bool, can_compare: bool
) -> str:
    way = "descending" if is_descending else "ascending"
    known = f" It is known that {', '.join(facts)}." if facts else ""
    steps = "comparisons and swaps" if can_compare else "swaps"
    return (
        f"The items {', '.join(order)} have hidden values and stand in this order.{known} Bring them "
        f"into {way} order with as few {steps} as possible. Stop as soon as they are "
        "sorted; give no answer."
    )
