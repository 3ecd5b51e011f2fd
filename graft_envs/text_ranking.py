"""Ranks texts by the words they share with a query: Okapi BM25 in memory, with numpy alone.

For the tens of thousands of texts that an environment brings itself. `graft_search.bm25` searches
millions of documents with a compiled index on disk, stems words, and needs the bm25s package.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from graft_search.bm25 import top

K1, B = 0.9, 0.4
"""How fast repeated words stop counting; how much long texts are discounted."""
MAX_WORDS = 64
"""Different words of a query that are used; a policy may write a megabyte of them."""

_WORD = re.compile(r"[a-z0-9]+")


def words_of(text: str) -> list[str]:
    """ "Non-slip, 10 mm" -> ["non", "slip", "10", "mm"]"""
    return _WORD.findall(text.lower())


class TextRanking:
    """An index over texts, numbered from 0.

    >>> TextRanking(["red lamp", "red shoe", "blue lamp"]).search("a blue lamp", 2)
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
        self.size = len(texts)
        self.weights: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        """Word -> the texts that contain it, and its weight in each."""
        for word, numbers in found.items():
            rarity = math.log(1 + (len(texts) - len(numbers) + 0.5) / (len(numbers) + 0.5))
            added = [
                rarity * tf * (K1 + 1) / (tf + K1 * (1 - B + B * lengths[n] / mean))
                for n in numbers
                for tf in (counts[n][word],)
            ]
            self.weights[word] = np.array(numbers, dtype=np.intp), np.array(added)

    def search(self, query: str, limit: int) -> list[int]:
        """The numbers of the best texts, best first; texts that share no word are left out."""
        scores = np.zeros(self.size)
        for word in list(dict.fromkeys(words_of(query[:4000])))[:MAX_WORDS]:
            if word in self.weights:
                numbers, added = self.weights[word]
                scores[numbers] += added
        return [number for number, _ in top(scores, limit)]
