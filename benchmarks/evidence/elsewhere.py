"""Claims whose numbers are on other pages, measured there before the harness was here."""

from __future__ import annotations

from typing import NamedTuple


class Elsewhere(NamedTuple):
    """A claim, and what its numbers allow to say."""

    claim: str
    source: str
    verdict: str
    """Begins with holds, does not, not shown, or seen once."""
    scale: str
    where: str
    """The page and heading with runs, seeds, commands and machine; it links back."""


SMALL = "1.1M from random weights, SmolLM2-135M; 3 seeds each"
TOY = "a tiny model from random weights, 3 seeds"

ELSEWHERE = (
    Elsewhere(
        "Branching reaches the same score with half of the tool calls",
        "ARPO",
        "does not: the same score step for step, with about a quarter of the calls saved",
        SMALL,
        "branching.md#results",
    ),
    Elsewhere(
        "Entropy decides where to fork",
        "ARPO",
        "does not at the published weights, where each result is a fair coin",
        SMALL,
        "branching.md#results",
    ),
    Elsewhere("AEPO learns more than ARPO", "AEPO", "does not", SMALL, "branching.md#results"),
    Elsewhere(
        "Expanded actions learn more than the same calls in tags",
        "EARL",
        "not shown: no difference where a name is a single character",
        TOY,
        "expa.md#toy-three-seeds-from-random-weights",
    ),
    Elsewhere(
        "Counterfactual credit learns rare calls sooner",
        "EARL",
        "holds by steps; does not by sampled tokens",
        TOY,
        "expa.md#the-same-with-very-rare-calls",
    ),
    Elsewhere(
        "EARL ends above prompts with GRPO or CPO, and above SFT",
        "EARL",
        "not shown",
        "SmolLM2-135M, 1 seed",
        "expa.md#smollm2-135m-instruct-arithmetic-and-countdown-one-seed",
    ),
    Elsewhere(
        "ReBN ends above GRPO over turns",
        "GEM",
        "holds in guess the number, where batches differ too; does not in questions with search",
        "SmolLM2-135M, 3 seeds",
        "originals.md#smollm2-135m-instruct-on-one-h200",
    ),
    Elsewhere(
        "Credit for turns or segments learns more than GRPO",
        "GEM, GiGPO, TreeRPO",
        "not shown",
        "0.5M from random weights, 3 seeds",
        "algorithms.md#four-credits-on-a-game-of-several-turns",
    ),
    Elsewhere(
        "Distillation on the student's own attempts ends above SFT on the teacher's",
        "GKD, on-policy distillation",
        "not shown",
        "0.2M and 81M, 1 seed each",
        "distillation.md#measured",
    ),
    Elsewhere(
        "A learner that knows the masks of a schema learns more than one that does not",
        "graft",
        "not shown: both learn with one update a step",
        TOY,
        "engine.md#structured-answers",
    ),
    Elsewhere(
        "Self-play ends in a policy that only beats itself",
        "graft",
        "seen once",
        "0.5M from random weights, 1 seed",
        "games.md#a-run-on-a-cpu",
    ),
)
