"""pass@k, maj@k, intervals and p-values against closed forms, enumeration and numbers by hand."""

import itertools
import math
import random

import numpy as np
import pytest

from graft.evaluate.estimates import (
    SUBSETS,
    compare,
    estimate,
    flip_p,
    majority_at_k,
    majority_vote,
    pass_at_k,
)
from graft.evaluate.results import meaning_of, numbered


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n):
    for right in range(n + 1):
        attempts = [1] * right + [0] * (n - right)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(attempts, k))
            share = sum(map(any, subsets)) / len(subsets)
            assert pass_at_k(n, right, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_of_simulated_attempts_estimates_the_closed_form_without_bias():
    """Tasks with known chances p: the truth is the mean of 1 - (1 - p)^k."""
    draw = np.random.default_rng(0)
    chances = draw.beta(0.5, 1.5, size=400)
    for k in (1, 4, 8):
        truth = float(np.mean(1 - (1 - chances) ** k))
        rights = draw.binomial(16, chances, size=(60, 400))  # 60 evaluations of 16 attempts
        found = [np.mean([pass_at_k(16, int(c), k) for c in row]) for row in rights]
        error = np.std(found) / math.sqrt(len(found))
        assert abs(np.mean(found) - truth) < 4 * error
        plug_in = np.mean(1 - (1 - rights / 16) ** k)
        if k > 1:  # what others log: too small, and this test can see it
            assert truth - plug_in > 4 * error


def test_pass_at_k_stays_exact_where_the_numbers_are_huge():
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5, abs=1e-12)
    with pytest.raises(ValueError, match="between 1 and 4"):
        pass_at_k(4, 1, 5)


def test_the_majority_wins_and_of_a_tie_the_answer_that_was_seen_first():
    assert majority_vote([0, 1, 0, 2], [0, 1, 0, 0]) == 0.0
    assert majority_vote([0, 1, 1, 0], [1, 0, 0, 1]) == 1.0  # 2 against 2: answer 0 came first
    assert majority_vote([1, 0, 0, 1], [0, 1, 1, 0]) == 0.0
    assert majority_vote([-1, -1, 0], [0, 0, 1]) == 1.0  # who gave no answer does not vote
    assert majority_vote([-1, -1], [1, 1]) == 0.0
    assert (
        majority_vote([0, 0], [1.0, 0.5]) == 0.75
    )  # the same answer, graded on more than the answer


def test_majority_at_k_averages_over_the_sets_of_k():
    # answers 7 7 3, 7 is wrong: {7,7} 0, {7,3} 7 first 0, {7,3} 0
    assert majority_at_k([0, 0, 1], [0, 0, 1], 2) == 0.0
    # 3 7 7, 3 is right: {3,7} 1, {3,7} 1, {7,7} 0
    assert majority_at_k([0, 1, 1], [1, 0, 0], 2) == pytest.approx(2 / 3)
    assert majority_at_k([0, 1, 1], [1, 0, 0], 1) == pytest.approx(1 / 3)
    assert majority_at_k([0, 1, 1], [1, 0, 0], 3) == 0.0


def test_majority_over_drawn_sets_is_near_that_over_all_of_them():
    votes = [0] * 6 + [1] * 6 + [2] * 4
    random.Random(1).shuffle(votes)
    rewards = [float(vote == 0) for vote in votes]
    assert math.comb(16, 8) > SUBSETS
    every = [
        majority_vote([votes[i] for i in some], [rewards[i] for i in some])
        for some in itertools.combinations(range(16), 8)
    ]
    found = majority_at_k(votes, rewards, 8)
    assert found == majority_at_k(votes, rewards, 8)
    assert abs(found - np.mean(every)) < 4 * np.std(every) / math.sqrt(SUBSETS)


def test_equal_answers_are_one_vote():
    assert numbered(["The Louvre", "7", "louvre.", "", "7.0", "$7$"]) == [0, 1, 0, -1, 1, 1]
    assert numbered(["x-1", "x+1", "x - 1"]) == [0, 1, 0]
    assert numbered(["(1,2)", "12", "-5", "5"]) == [0, 1, 2, 3]
    assert meaning_of(r"\text{Ann}") == meaning_of("ann")


def test_about_95_of_100_intervals_hold_the_truth():
    draw = np.random.default_rng(3)
    held = 0
    for number in range(300):
        values = draw.binomial(8, draw.beta(1, 1, size=80)) / 8  # the mean of all tasks is 0.5
        low, high = estimate(values.tolist(), seed=number).interval
        held += low <= 0.5 <= high
    assert 0.90 < held / 300 < 0.985


def test_an_interval_draws_tasks_and_is_the_same_every_time():
    alike = estimate([0.0, 1.0] * 50)
    assert alike == estimate([0.0, 1.0] * 50)
    low, high = alike.interval
    assert (high - low) / 2 == pytest.approx(1.96 * 0.5 / 10, rel=0.15)
    assert estimate([0.25]).interval is None
    assert estimate([0.1, 0.1, 0.1]).interval == (estimate([0.1] * 3).value,) * 2
    with pytest.raises(ValueError, match="no tasks"):
        estimate([])


def test_few_differences_are_tested_against_every_flip():
    # sums of +-1 +-1 +-2: |4| of 8 flips: ++ + and -- -
    assert flip_p([1.0, 1.0, 2.0]) == 2 / 8
    assert flip_p([1.0, -1.0]) == 1.0
    assert flip_p([0.0, 0.0, 1.0, 1.0]) == 0.5  # tasks without a difference do not count
    assert flip_p([0.1] * 10) == 2 / 1024  # though sums of 0.1 round


def test_p_values_of_pure_chance_are_spread_evenly():
    draw = np.random.default_rng(5)
    found = np.array([flip_p(draw.normal(size=30).tolist(), seed=i) for i in range(200)])
    assert 0.02 <= (found < 0.1).mean() <= 0.18
    assert 0.4 <= (found < 0.5).mean() <= 0.6


def test_pairing_sees_a_gain_that_separate_intervals_hide():
    draw = np.random.default_rng(7)
    hard = draw.uniform(size=60)
    ours, theirs = hard + 0.05, hard + draw.normal(scale=0.02, size=60)
    found = compare(ours.tolist(), theirs.tolist())
    assert found.p < 0.001 and found.interval[0] > 0
    assert found.value == pytest.approx(found.ours - found.theirs)
    apart = estimate(ours.tolist()).interval, estimate(theirs.tolist()).interval
    assert apart[0][0] < apart[1][1]  # as separate scores they overlap
