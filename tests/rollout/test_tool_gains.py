"""Which tool is forced next, on paper."""

import math

import pytest

from graft.rollout.branches.counterfactual import FIRST_GAIN, chances, update


def test_an_average_moves_by_a_tenth():
    assert update(FIRST_GAIN, [1.0, 0.0]) == pytest.approx(0.0009 + 0.05)
    assert update(0.5, [-1.0]) == pytest.approx(0.35)


@pytest.mark.parametrize("gains", [[], [math.nan], [math.inf, 0.0]])
def test_nothing_rewritten_or_no_number_leaves_it_as_it_was(gains):
    assert update(0.3, gains) == 0.3


def test_chances_grow_with_what_a_tool_has_brought():
    first = chances({"compare": 0.0509, "swap": 0.001})
    assert first["compare"] == pytest.approx(math.e / (math.e + math.exp(0.001 / 0.0509)))
    assert sum(first.values()) == pytest.approx(1)
    harmful = chances({"a": 0.2, "b": -5.0, "c": 0.1})
    total = math.e + 1 + math.exp(0.5)
    assert list(harmful.values()) == pytest.approx(
        [math.e / total, 1 / total, math.exp(0.5) / total]
    )


@pytest.mark.parametrize("averages", [{"a": 0.0, "b": 0.0}, {"a": -1.0, "b": 9e-6}])
def test_tools_that_brought_nothing_are_equally_likely(averages):
    assert chances(averages) == {"a": 0.5, "b": 0.5}


def test_a_single_tool_is_always_that_one():
    assert chances({"swap": -3.0}) == chances({"swap": 0.4}) == {"swap": 1.0}
