"""Entropies from the likeliest tokens, by hand."""

import math

import pytest

from graft.engine.remote.top_entropy import entropy_of, known_tokens


def logs(*probs: float) -> list[float]:
    return [math.log(p) if p else -math.inf for p in probs]


def test_it_is_exact_when_every_token_is_known():
    want = 0.5 * math.log(2) + 0.25 * math.log(4) + 2 * 0.125 * math.log(8)
    assert entropy_of(logs(0.5, 0.25, 0.125, 0.125)) == pytest.approx(want)
    assert entropy_of(logs(1.0, 0.0)) == 0.0


def test_the_rest_counts_as_if_it_were_as_likely_as_the_last_that_is_known():
    # 0.5 ln 2 + 0.25 ln 4 + 0.25 ln 4
    assert entropy_of(logs(0.5, 0.25)) == pytest.approx(math.log(2) * 1.5)
    assert entropy_of(logs(0.5, 0.25)) < entropy_of(logs(0.5, 0.25, 0.125, 0.125))


def test_a_token_that_was_drawn_from_the_rest_is_known_too():
    # 0.5 ln 2 + 0.25 ln 4 + 0.125 ln 8 + 0.125 ln 4
    found = entropy_of(logs(0.5, 0.25), math.log(0.125))
    assert found == pytest.approx(math.log(2) * (0.5 + 0.5 + 0.375 + 0.25))
    assert entropy_of(logs(0.5, 0.25), math.log(0.25)) == entropy_of(logs(0.5, 0.25))


def test_tokens_that_were_cut_away_count_nothing():
    assert entropy_of(logs(0.5, 0.5, 0.0)) == pytest.approx(math.log(2))
    assert entropy_of([math.log(0.5), math.log(0.5), -9999.0]) == pytest.approx(math.log(2))


def test_known_tokens_is_zero_when_all_tokens_are_known():
    assert known_tokens(258) == 20
    assert known_tokens(20) == known_tokens(5) == 0
    assert known_tokens(258, 5) == 5
