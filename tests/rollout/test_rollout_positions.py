"""Where a call could have been made, on paper."""

import math

import pytest

from graft.rollout.branches.positions import draw, insertable, score, weights
from graft.types import NO_ACTION, Author, Span


def policy(parent: int, actions: list[int], modes: list[int]) -> Span:
    n = len(actions)
    tokens = [max(action, 0) % 9 for action in actions]
    return Span(parent, Author.POLICY, tokens, actions, [0.0] * n, [0.0] * n, modes, [True] * n)


def test_a_call_can_be_inserted_before_plain_tokens_only():
    """Vocabulary of 10; 10 routes, writes two tokens and enters mode 1, where 11 exits."""
    spans = [
        Span(None, Author.TASK, [1, 2, 3]),
        policy(0, [4, 5, 10, NO_ACTION, 11], [0, 0, 0, 0, 1]),  # places 3, 4, then a call
        Span(1, Author.ENV, [6, 6]),  # tokens 8, 9
        policy(2, [4, 0], [0, 0]),  # a token, and the end of the text
    ]
    assert insertable(spans, language=0, vocab_size=10) == [3, 4, 10, 11]


def test_inside_tags_nothing_can_be_inserted_and_none_of_a_closing_tag():
    """Tokens 1 2 open a call (mode 1 after the 1), 3 is written inside, 4 closes and writes 4 5."""
    spans = [
        Span(None, Author.TASK, [9]),
        policy(0, [7, 1, 2, 3, 4, NO_ACTION], [0, 0, 1, 2, 2, 2]),
    ]
    assert insertable(spans, language=0, vocab_size=10) == [1, 2]


def test_a_score_is_of_the_likeliest_way_in():
    assert score([[-2.0, -1.0], [-5.0]], 10) == pytest.approx(-0.3)
    assert score([[-2.0, -1.0], [-1.0]], 10) == pytest.approx(-0.1)
    assert score([[-2.0, -1.0]], 1) == -3  # tags: there is no action beyond the vocabulary
    assert score([[-math.inf], [-4.0]], 2) == -2


LOGS = [math.log(n) for n in (1, 4, 3, 2)]


def test_places_are_cut_by_number_then_by_share():
    assert weights(LOGS, 10, 1.0) == pytest.approx([0.1, 0.4, 0.3, 0.2])
    assert weights(LOGS, 3, 1.0) == pytest.approx([0, 4 / 9, 3 / 9, 2 / 9])
    assert weights(LOGS, 3, 0.7) == pytest.approx([0, 4 / 7, 3 / 7, 0])  # 4/9 < 0.7 <= 7/9
    assert weights(LOGS, 10, 0.7) == pytest.approx([0, 4 / 7, 3 / 7, 0])  # 0.4 < 0.7 <= 0.7
    assert weights(LOGS, 1, 0.9) == [0, 1, 0, 0]
    assert weights(LOGS, 10, 0.01) == [0, 1, 0, 0]


def test_of_equal_places_the_earlier_are_kept():
    assert weights([-0.1] * 4, 2, 1.0) == [0.5, 0.5, 0, 0]


def test_an_impossible_place_is_never_drawn():
    assert weights([-math.inf, -1.0], 10, 1.0) == [0, 1]


def test_temperature_ten_is_nearly_uniform_over_the_ten_best():
    """Log-probs -20, -19, ..., -1: the ten best are e^-0.9 : ... : e^0, top-p drops the last."""
    scores = [score([[-float(n)]], 10) for n in range(20, 0, -1)]
    chances = weights(scores, 10, 0.9)
    total = sum(math.exp(-n / 10) for n in range(10))
    share = [math.exp(-n / 10) / total for n in range(10)]
    assert sum(share[:8]) < 0.9 < sum(share[:9])
    assert chances[:11] == [0.0] * 11
    assert chances[-1] == pytest.approx(share[0] / sum(share[:9]))


def test_a_draw_inverts_the_running_sum():
    assert [draw([0.25, 0.0, 0.75], u) for u in (0.0, 0.2, 0.25, 0.99)] == [0, 0, 2, 2]
    assert draw([0.1] * 3 + [0.0], 0.9999) == 2  # a sum that rounds to below 1
