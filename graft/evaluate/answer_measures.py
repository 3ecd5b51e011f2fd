"""Measures of an answer against the accepted ones, as ARPO's evaluation computes them.

    answer "the city of Paris", accepted "Paris":   em 0, acc 1 (it contains the accepted text), f1 0.5

Texts are compared in lower case, without articles, with single blanks; punctuation stays. The best of
several accepted answers counts.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")

MEASURES = ("em", "acc", "f1")
NOT = "not attempted"
"""The share of the answers that a judge with SimpleQA's grades calls neither right nor wrong."""
SMOOTHING = 0.1
"""Of tool productivity, in calls."""


def answer_measures(answer: str, accepted: Any) -> dict[str, float]:
    """em, acc and f1; {} where the accepted answer is not a text, a number or a list of them.

    >>> answer_measures("The Louvre, Paris", ["Paris", "Louvre"])
    {'em': 0.0, 'acc': 1.0, 'f1': 0.0}
    """
    several = accepted if isinstance(accepted, list | tuple) else [accepted]
    if not several or not all(isinstance(one, str | int | float) for one in several):
        return {}
    each = [_against(answer, str(one)) for one in several]
    return {name: max(one[name] for one in each) for name in MEASURES}


def _against(answer: str, accepted: str) -> dict[str, float]:
    given, wanted = _plain(answer), _plain(accepted)
    if not wanted:  # all articles: every text would contain it
        given, wanted = answer.lower().strip(), accepted.lower().strip()
    words, wanted_words = Counter(given.split()), Counter(wanted.split())
    common = (words & wanted_words).total()
    return {
        "em": float(given == wanted),
        "acc": float(bool(given) and wanted in given),
        "f1": 2 * common / (words.total() + wanted_words.total()) if common else 0.0,
    }


def _plain(text: str) -> str:
    return " ".join(_ARTICLE.sub(" ", text.lower()).split())


def given_attempted(score: float, not_attempted: float) -> float:
    """The share of right answers among those that were attempted; 0 if none was.

    >>> given_attempted(0.4, 0.2)
    0.5
    """
    return score / (1 - not_attempted) if not_attempted < 1 else 0.0


def simpleqa_f(score: float, not_attempted: float) -> float:
    """SimpleQA's F-score: the harmonic mean of the score and of the score given an attempt.

    >>> round(simpleqa_f(0.4, 0.2), 4)
    0.4444
    """
    attempted = given_attempted(score, not_attempted)
    return 2 * score * attempted / (score + attempted) if score else 0.0


def productivity(score: float, calls: float) -> float:
    """Tool productivity: the score in percent, times calls / (calls + 0.1).

    >>> round(productivity(0.5, 0.9), 6), productivity(0.5, 0.0)
    (45.0, 0.0)
    """
    return 100 * score * calls / (calls + SMOOTHING)
