"""How well a purchase fulfils an instruction, between 0 and 1.

    type factor x (attributes matched + options matched + price kept) / (attributes + options + 1)

The wanted lamp in the wrong colour, with 2 attributes and 1 option: 1.0 x (2 + 0 + 1) / 4 = 0.75.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import NamedTuple

from graft_envs.text_ranking import words_of
from graft_envs.webshop.shop import Goal, Product

ALIKE = 85
"""Two texts with a fuzzy ratio above this count as equal."""
SMALL_WORDS = set(words_of("a an and by for from in of on or per the to with"))


class PurchaseScore(NamedTuple):
    type_factor: float
    attributes: int
    options: int
    price: bool
    reward: float


def score(bought: Product, chosen: Mapping[str, str], wanted: Product, goal: Goal) -> PurchaseScore:
    """The score of a purchase; `chosen` are its options: {"color": "red"}."""
    kind = type_factor(bought, wanted)
    attributes = sum(has_attribute(bought, attribute) for attribute in goal.attributes)
    options = sum(is_chosen(option, chosen) for option in goal.options)
    price = bought.price <= goal.price_upper
    matches = attributes + options + price
    most = len(goal.attributes) + len(goal.options) + 1
    return PurchaseScore(kind, attributes, options, price, kind * matches / most)


def type_factor(bought: Product, wanted: Product) -> float:
    """How well the kind of product fits.

    overlap   share of the words of the wanted title (small words aside) in the bought one's
    1.0       the same query, or two levels of category in common, or an overlap above 0.2
    0.5       none of these
    0.1       an overlap below 0.1, whatever else agrees
    0.0       no word in common
    """
    aim = set(words_of(wanted.title)) - SMALL_WORDS
    overlap = len(aim & set(words_of(bought.title))) / len(aim) if aim else 0.2
    if overlap == 0:
        return 0.0
    if overlap < 0.1:
        return 0.1
    common = levels(bought) & levels(wanted)
    is_alike = bought.query == wanted.query or len(common) >= 2 or overlap > 0.2
    return 1.0 if is_alike else 0.5


def levels(product: Product) -> set[str]:
    return {level.strip() for level in product.product_category.split("›")}


def has_attribute(product: Product, attribute: str) -> bool:
    """Whether an attribute is listed, exactly or nearly, or is in the title, features or description."""
    if any(likeness(attribute, own) > ALIKE for own in product.attributes):
        return True
    text = "\n".join([product.title, " ".join(product.features), product.description])
    return attribute.lower() in text.lower()


def is_chosen(option: str, chosen: Mapping[str, str]) -> bool:
    """Whether an option was chosen: sizes must be equal ("8" is not "8.5"), other options similar."""
    return any(
        option == value if name == "size" else likeness(option, value) > ALIKE
        for name, value in chosen.items()
    )


def likeness(one: str, other: str) -> float:
    """0 to 100: how similar two texts are as sets of words.

    likeness("blue, dark", "dark blue") = 100; "blue" and "dark blue" too: one contains the other.
    """
    a, b = set(words_of(one)), set(words_of(other))
    if not a or not b:
        return 100.0 if one.strip().lower() == other.strip().lower() else 0.0
    both = " ".join(sorted(a & b))
    left = " ".join([both, *sorted(a - b)]).strip()
    right = " ".join([both, *sorted(b - a)]).strip()
    pairs = [(left, right), (both, left), (both, right)]
    return 100 * max(SequenceMatcher(None, *pair, autojunk=False).ratio() for pair in pairs)
