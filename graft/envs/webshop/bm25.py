"""Ranking texts by the words they share with a query: Okapi BM25 in plain Python.

Enough for a shop of some ten thousand products; a search over millions wants a compiled index.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

K1, B = 0.9, 0.4
"""How fast repeated words stop counting; how much long texts are discounted."""
MAX_WORDS = 64
"""Different words of a query that count; a policy may write a megabyte of them."""

_WORD = re.compile(r"[a-z0-9]+")


def words_of(text: str) -> list[str]:
    """ "Non-slip, 10 mm" -> ["non", "slip", "10", "mm"]"""
    return _WORD.findall(text.lower())


class Bm25:
    """
    >>> Bm25(["red lamp", "red shoe", "blue lamp"]).search("a blue lamp", 2)
    [2, 0]
    """

    def __init__(self, texts: Sequence[str]) -> None:
        counts = [Counter(words_of(text)) for text in texts]
        lengths = [count.total() for count in counts]
        mean = sum(lengths) / max(1, len(lengths))
        found: defaultdict[str, list[int]] = defaultdict(list)
        for number, count in enumerate(counts):
            for word in count:
                found[word].append(number)
        self.weights: dict[str, list[tuple[int, float]]] = {}  # word -> (text, what it adds there)
        for word, numbers in found.items():
            rarity = math.log(1 + (len(texts) - len(numbers) + 0.5) / (len(numbers) + 0.5))
            self.weights[word] = [
                (n, rarity * tf * (K1 + 1) / (tf + K1 * (1 - B + B * lengths[n] / mean)))
                for n in numbers
                for tf in (counts[n][word],)
            ]

    def search(self, query: str, limit: int) -> list[int]:
        """The numbers of the best texts, best first; texts that share no word are left out."""
        scores: defaultdict[int, float] = defaultdict(float)
        for word in list(dict.fromkeys(words_of(query[:4000])))[:MAX_WORDS]:
            for number, weight in self.weights.get(word, ()):
                scores[number] += weight
        return heapq.nsmallest(limit, scores, key=lambda number: (-scores[number], number))
