"""How unsure a policy is after an observation, and how likely it makes a fork.

first 3 tokens     entropies in nats        mean    / ln 16, the vocabulary
of the attempt     0.2  0.9  0.4            0.50    0.18    the baseline
after a result     1.3  1.1  0.6            1.00    0.36

change 0.36 - 0.18 = 0.18;  probability 0.5 + 0.2 * 0.18 = 0.536;  branched twice in a row just
before, at 0.05 each: 0.536 * (1 - 0.1) = 0.482
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from graft.types import Author, Span

RULES = ("stochastic", "threshold")
ORDERS = ("entropy", "index", "arrival")
COUNTED_OVER = ("path", "prompt")
NUMBERS = ("branch_probability", "entropy_weight", "threshold", "sensitivity", "penalty")


@dataclass(frozen=True, slots=True)
class ForkRule:
    """The rule when and how often to fork."""

    samples: int
    initial_rollouts: int
    """Attempts that begin at the prompt, where `dynamic` does not decide; forks may add the others."""
    beam_size: int
    """Continuations of one observation: the source and up to beam_size - 1 forks."""
    branch_probability: float
    """Of one more continuation, where the policy is as unsure as it was at the start."""
    entropy_weight: float
    """How much a change of entropy adds to it."""
    tokens: int
    """Number of tokens over which entropy is measured."""
    rule: str
    """"stochastic": a draw with that probability; "threshold": always, if it is above `threshold`."""
    threshold: float
    order: str
    """Which attempt forks first while there is budget: "entropy" (the largest change) or "index" (the
    oldest) among all of the prompt's attempts, which wait for each other; "arrival": the first to arrive."""
    dynamic: bool = False
    """The first attempt decides how many begin at the prompt, see `root_budget`."""
    sensitivity: float = 0.5
    penalty: float = 0.0
    """Subtracted for each time in a row that a trajectory has forked."""
    penalty_over: str = "path"
    """"prompt" counts rounds in a row in which any trajectory of the prompt has."""

    def __post_init__(self) -> None:
        for name in NUMBERS:
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value):
                raise ValueError(f"{name}={value!r}: must be a finite number")
        for name in ("samples", "initial_rollouts", "beam_size", "tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}: must be a whole number, 1 or more")
        if not isinstance(self.dynamic, bool):
            raise ValueError(f"dynamic={self.dynamic!r}: must be true or false")
        if self.initial_rollouts > self.samples:
            raise ValueError(
                f"initial_rollouts={self.initial_rollouts} is more than the {self.samples} attempts "
                "of a task; lower it, or raise rollout.samples"
            )
        if not 0 <= self.branch_probability <= 1:
            raise ValueError(f"branch_probability={self.branch_probability}: must lie in [0, 1]")
        if self.penalty < 0:
            raise ValueError(f"penalty={self.penalty}: must be 0 or more")
        for name, known in (("rule", RULES), ("order", ORDERS), ("penalty_over", COUNTED_OVER)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: must be one of {', '.join(known)}"
                )


def mean_entropy(entropies: Sequence[float], vocab_size: int) -> float:
    """The mean, from 0 (sure) to 1 (any of the vocabulary); of no token at all, 0.

    >>> round(mean_entropy([0.2, 0.9, 0.4], 16), 2)
    0.18
    """
    if not entropies:
        return 0.0
    return sum(entropies) / len(entropies) / math.log(max(vocab_size, 2))


def first_decisions(spans: Sequence[Span], tokens: int) -> list[float]:
    """Entropies of the first decisions of a turn; tokens that continue a decision do not count."""
    chosen = [h for s in spans for h, is_own in zip(s.entropies, s.mask, strict=True) if is_own]
    return chosen[:tokens]


def turn_entropies(spans: Sequence[Span], tokens: int, vocab_size: int) -> list[float]:
    """`mean_entropy` of the first decisions of every turn: [first, after a result, ...]."""
    turns: list[list[Span]] = []
    previous = None
    for span in spans:
        if span.author is Author.POLICY:
            if previous is not Author.POLICY:
                turns.append([])
            turns[-1].append(span)
        previous = span.author
    return [mean_entropy(first_decisions(turn, tokens), vocab_size) for turn in turns]


def probability(
    base: float, weight: float, change: float, penalty: float = 0.0, in_a_row: int = 0
) -> float:
    """Probability of a fork here: clip(base + weight * change) * (1 - penalty * in_a_row), never negative.

    >>> probability(0.5, 0.2, 0.18), round(probability(0.5, 0.2, 0.18, 0.05, 2), 4)
    (0.536, 0.4824)
    """
    return min(max(base + weight * change, 0.0), 1.0) * max(1.0 - penalty * in_a_row, 0.0)


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)), without overflow."""
    if x >= 0:
        return 1 / (1 + math.exp(-x))
    small = math.exp(max(x, -700.0))
    return small / (1 + small)


def root_budget(samples: int, sensitivity: float, root: float, after_results: float) -> int:
    """How many of `samples` begin at the prompt: more where the policy is unsure there.

    samples * sigmoid(sensitivity * (root - after_results)), rounded, at least 1:

    >>> root_budget(16, 0.5, 0.3, 0.3), root_budget(16, 4.0, 0.9, 0.4), root_budget(16, 4.0, 0.4, 0.9)
    (8, 14, 2)
    """
    share = sigmoid(sensitivity * (root - after_results))
    return min(max(round(samples * share), 1), samples)
