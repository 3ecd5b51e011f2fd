"""The reward of a purchase and the search, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft_envs.text_ranking import K1, B, TextRanking, words_of
from graft_envs.webshop.reward import has_attribute, is_chosen, likeness, score, type_factor
from graft_envs.webshop.shop import Goal, Product

LAMP = Product(
    asin="B000000001",
    title="Bright reading lamp for the desk",
    query="desk lamp",
    product_category="Home › Lighting › Desk Lamps",
    price=24.0,
    attributes=("eye protection", "energy efficient"),
    options={"color": ("white", "sage green"), "size": ("8", "8.5")},
    features=("Turns by 180 degrees",),
    description="Stays cool.",
    reviews=(),
    rating="N.A.",
)
GOAL = Goal(
    asin=LAMP.asin,
    instruction="",
    attributes=("eye protection", "stays cool"),
    options=("sage green",),
    price_upper=30.0,
)


def test_all_wanted_properties_are_one():
    result = score(LAMP, {"color": "sage green"}, LAMP, GOAL)
    assert result == (1.0, 2, 1, True, 1.0)


def test_each_miss_costs_its_share():
    assert score(LAMP, {"color": "white"}, LAMP, GOAL).reward == 3 / 4
    assert score(LAMP, {}, LAMP, GOAL).reward == 3 / 4
    dear = replace(LAMP, price=31.0)
    assert score(dear, {"color": "sage green"}, LAMP, GOAL).reward == 3 / 4
    plain = replace(LAMP, attributes=(), description="")
    assert score(plain, {}, LAMP, GOAL).reward == 1 / 4


def test_more_options_than_wanted_do_not_pay_more():
    chosen = {"color": "sage green", "size": "8"}
    assert score(LAMP, chosen, LAMP, GOAL).reward == 1.0
    both = {"color": "sage green", "trim": "green sage"}
    assert score(LAMP, both, LAMP, GOAL).options == 1


@pytest.mark.parametrize(
    "title, query, category, factor",
    [
        # the wanted title has four words that count: bright, reading, lamp, desk
        ("Reading lamp", "x", "y", 1.0),  # 2 of 4
        ("A lamp in red", "x", "y", 1.0),  # 1 of 4 is above 0.2
        ("A chair in red for the", "desk lamp", "Home › Lighting", 0.0),  # no word that counts
    ],
)
def test_the_kind_of_thing(title: str, query: str, category: str, factor: float):
    bought = replace(LAMP, title=title, query=query, product_category=category)
    assert type_factor(bought, LAMP) == factor


def test_the_kind_of_thing_by_query_and_category():
    wanted = replace(LAMP, title="one two three four five six seven eight")
    once = replace(LAMP, title="one only", query="x", product_category="y")
    assert type_factor(once, wanted) == 0.5  # 1/8 and nothing else
    assert type_factor(replace(once, query="desk lamp"), wanted) == 1.0
    assert type_factor(replace(once, product_category="Home › Lighting › Rugs"), wanted) == 1.0
    assert type_factor(replace(once, product_category="Home › Rugs"), wanted) == 0.5
    long = replace(LAMP, title=" ".join(f"w{n}" for n in range(11)))
    assert type_factor(replace(LAMP, title="w1"), long) == 0.1  # 1/11, though the query agrees
    assert type_factor(LAMP, replace(LAMP, title="")) == 1.0


def test_attributes_may_be_nearly_listed_or_written_anywhere():
    assert has_attribute(LAMP, "protection for the eye")  # contains all words of one listed
    assert has_attribute(LAMP, "180 degrees")
    assert has_attribute(LAMP, "Reading Lamp")
    assert not has_attribute(LAMP, "dimmable")


def test_options_agree_nearly_and_sizes_exactly():
    assert is_chosen("sage green", {"color": "green sage"})
    assert is_chosen("sage-green", {"color": "sage green"})
    assert not is_chosen("sage green", {"color": "white"})
    assert is_chosen("8", {"size": "8"})
    assert not is_chosen("8", {"size": "8.5"})
    assert not is_chosen("8", {})


def test_likeness_is_of_words_whatever_their_order():
    assert likeness("blue, dark", "dark blue") == 100
    assert likeness("blue", "dark blue") == 100
    assert likeness("abc", "abd") == pytest.approx(100 * 2 * 2 / 6)  # two letters of three, twice
    assert likeness("red", "blue") < 50
    assert likeness("€", "€") == 100 and likeness("€", "£") == 0


@given(st.text(max_size=12), st.text(max_size=12))
def test_likeness_is_symmetric_and_bounded(one: str, other: str):
    assert 0 <= likeness(one, other) <= 100
    assert likeness(one, one) == 100


def test_bm25_by_hand():
    index = TextRanking(["red lamp", "red shoe", "blue lamp blue"])
    assert index.search("a blue lamp", 3) == [2, 0]
    assert index.search("red", 1) == [0]  # equal scores: the earlier text
    assert index.search("green !", 3) == []
    # "blue": in 1 of 3 texts, twice in a text of 3 words where the mean is 7/3
    rarity = 0.9808292530117262  # ln(1 + 2.5 / 1.5)
    weight = rarity * 2 * (K1 + 1) / (2 + K1 * (1 - B + B * 3 / (7 / 3)))
    texts, added = index.weights["blue"]
    assert texts.tolist() == [2] and added.tolist() == pytest.approx([weight])


def test_words():
    assert words_of("Non-slip, 10 MM é") == ["non", "slip", "10", "mm"]
    assert TextRanking([]).search("x", 3) == []
