"""pass@k and maj@k of a task, and intervals of means over tasks.

One task, n = 4 attempts, c = 1 of them right; their answers 7, 3, 7, 9 and rewards 0, 1, 0, 0:

    avg      0.25    the mean reward of an attempt
    pass@2   0.5     1 - C(3, 2) / C(4, 2): the share of pairs with at least one right attempt
    maj@4    0.0     7 is the most frequent answer, and 7 is wrong

Each is one number per task, and a score is the mean over tasks. Attempts at one task are correlated, so
intervals resample tasks (bootstrap) and comparisons pair tasks.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

NO_VOTE = -1
"""An attempt without an answer."""
RESAMPLES = 2000
"""Bootstrap means behind an interval."""
FLIPS = 10_000
"""Random sign flips behind a p-value; of up to EXACT tasks that differ all flips are tried."""
EXACT = 12
SUBSETS = 256
"""Sets of k attempts that a majority is averaged over, where there are more of them."""
AT_ONCE = 4_000_000
"""Random numbers held in memory."""


def pass_at_k(attempts: int, right: int, k: int) -> float:
    """The share of the k-element sets of attempts that hold a right one; unbiased for any k <= n.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 1 <= k <= attempts:
        raise ValueError(f"pass@{k} of {attempts} attempts: k must lie between 1 and {attempts}")
    if not 0 <= right <= attempts:
        raise ValueError(f"{right} of {attempts} attempts cannot be right")
    return 1.0 - math.comb(attempts - right, k) / math.comb(attempts, k)


def majority_vote(votes: Sequence[int], rewards: Sequence[float]) -> float:
    """The mean reward of the attempts with the most frequent answer; of a tie the first one seen.

    >>> ballots = ([0, 1, 0, 2], [0.0, 1.0, 0.0, 0.0]), ([1, 0], [1.0, 0.0]), ([-1], [0.0])
    >>> tuple(majority_vote(*each) for each in ballots)
    (0.0, 1.0, 0.0)
    """
    counted = Counter(vote for vote in votes if vote != NO_VOTE)
    if not counted:
        return 0.0
    winner = counted.most_common(1)[0][0]  # of equal ones the first inserted
    earned = [reward for vote, reward in zip(votes, rewards, strict=True) if vote == winner]
    return math.fsum(earned) / len(earned)


def majority_at_k(votes: Sequence[int], rewards: Sequence[float], k: int, seed: int = 0) -> float:
    """`majority_vote` among k attempts, averaged over all sets of k of them, or over SUBSETS drawn ones."""
    attempts = len(votes)
    if not 1 <= k <= attempts:
        raise ValueError(f"maj@{k} of {attempts} attempts: k must lie between 1 and {attempts}")
    if math.comb(attempts, k) <= SUBSETS:
        chosen = list(combinations(range(attempts), k))
    else:
        draw = random.Random(seed)
        chosen = [sorted(draw.sample(range(attempts), k)) for _ in range(SUBSETS)]
    elected = [
        majority_vote([votes[i] for i in some], [rewards[i] for i in some]) for some in chosen
    ]
    return math.fsum(elected) / len(elected)


class Estimate(NamedTuple):
    """A mean over tasks and its 95% interval; None where a single task gives none."""

    value: float
    interval: tuple[float, float] | None


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """The mean, and the middle 95% of the means of as many tasks drawn with replacement.

    >>> estimate([1.0, 1.0, 1.0]), estimate([0.5])
    (Estimate(value=1.0, interval=(1.0, 1.0)), Estimate(value=0.5, interval=None))
    """
    if not len(values):
        raise ValueError("no tasks: there is nothing to take a mean of")
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return Estimate(mean, None)
    if min(values) == max(values):  # every resample has this mean; avoids the rounding of a sum
        return Estimate(mean, (mean, mean))
    known = np.asarray(values, dtype=np.float64)
    draw = np.random.default_rng(seed)
    rows = max(1, AT_ONCE // len(known))
    means = np.concatenate(
        [
            known[draw.integers(len(known), size=(min(rows, RESAMPLES - done), len(known)))].mean(1)
            for done in range(0, RESAMPLES, rows)
        ]
    )
    low, high = np.quantile(means, (0.025, 0.975))
    return Estimate(mean, (float(low), float(high)))


class Difference(NamedTuple):
    """Ours minus theirs over the tasks that both have."""

    tasks: int
    ours: float
    theirs: float
    value: float
    interval: tuple[float, float] | None
    p: float
    """The share of random swaps of the two sides, task by task, that differ as much."""


def compare(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Difference:
    """Paired: entry i of both is the same task."""
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} and {len(theirs)} tasks cannot be paired")
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    value, interval = estimate(gaps, seed)
    means = math.fsum(ours) / len(ours), math.fsum(theirs) / len(theirs)
    return Difference(len(gaps), *means, value, interval, flip_p(gaps, seed))


def flip_p(gaps: Sequence[float], seed: int = 0) -> float:
    """Two-sided p-value of a mean gap: the share of sign flips whose sum is as far from 0.

    >>> flip_p([1.0, 1.0, 1.0]), flip_p([0.0, 0.0])  # +++ and --- of eight flips
    (0.25, 1.0)
    """
    known = np.asarray([gap for gap in gaps if gap], dtype=np.float64)
    if not len(known):
        return 1.0
    seen = abs(float(known.sum())) * (1 - 1e-12) - 1e-15  # sums in another order round differently
    if len(known) <= EXACT:
        bits = np.arange(2 ** len(known))[:, None] >> np.arange(len(known)) & 1
        return float((abs((2 * bits - 1) @ known) >= seen).mean())
    draw = np.random.default_rng(seed)
    rows = max(1, AT_ONCE // len(known))
    count = 0
    for done in range(0, FLIPS, rows):
        bits = draw.integers(2, size=(min(rows, FLIPS - done), len(known)), dtype=np.int8)
        count += int((abs((2 * bits - 1) @ known) >= seen).sum())
    return (1 + count) / (1 + FLIPS)  # the observed difference is one of the flips
