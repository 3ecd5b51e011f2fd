"""The texts that the sorting tasks show the policy."""

from __future__ import annotations

from collections.abc import Sequence

from graft.tools.sorting import SortingSyntax

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
