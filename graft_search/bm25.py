"""Search by words: BM25 over a local corpus, with the bm25s package."""

from __future__ import annotations

import re
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graft_search.source import Hit
from graft_search.store import Corpus, Documents, build_once, short_hash

MAX_WORDS = 512  # of a query; bounds the work
VERSION = 1
"""Part of every index's name: increase it when `words` changes, and indexes are rebuilt."""

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")


class Bm25Source:
    """The documents that share rare words with the query, in order of Lucene's BM25.

    Of "Rome is a city", "Paris is a city" and "Rome fell" the query "city of rome" finds the first
    before the other two. Words that no document has are ignored; a query of only such words finds
    nothing. Equal scores keep the order of the corpus. The index is built at the first `open`
    of a corpus and then read from disk through memory maps, so that processes share one copy.
    """

    def __init__(
        self, corpus: str, *, k1: float = 0.9, b: float = 0.4, index: str | None = None
    ) -> None:
        if k1 < 0 or not 0 <= b <= 1:
            raise ValueError(f"BM25 with k1={k1}, b={b}; k1 is at least 0 and b from 0 to 1")
        # 0.9 and 0.4 are the values usual for passages of Wikipedia
        self.k1, self.b = k1, b
        self.corpus = Corpus(corpus, index)
        settings = short_hash(["bm25", VERSION, k1, b])
        self.fingerprint = f"bm25:{self.corpus.hash}:{settings}"
        self._folder = self.corpus.folder / f"bm25-{settings}"
        self._lock = threading.Lock()
        self._opened: tuple[Documents, Any, frozenset[str]] | None = None

    def open(self) -> None:
        self._open()

    def _open(self) -> tuple[Documents, Any, frozenset[str]]:
        with self._lock:
            if self._opened is None:
                bm25s = _library()
                # through `words` like every text, which drops the s of "this"
                stop = frozenset(words(" ".join(bm25s.stopwords.STOPWORDS_EN)))
                documents = self.corpus.documents()
                build_once(self._folder, lambda folder: self._build(documents, stop, folder))
                index = bm25s.BM25.load(self._folder, mmap=True, show_progress=False)
                self._opened = documents, index, stop
            return self._opened

    def _build(self, documents: Documents, stop: frozenset[str], folder: Path) -> None:
        vocabulary = {"": 0}  # never empty, or an index over wordless documents would fail
        numbers = [
            # ids out of the dict are one object per word, not one per occurrence
            [
                vocabulary.setdefault(word, len(vocabulary))
                for word in index_words(document.contents, stop)
            ]
            for document in documents
        ]
        index = _library().BM25(k1=self.k1, b=self.b, method="lucene")
        with np.errstate(invalid="ignore", divide="ignore"):  # without words the mean length is 0
            index.index((numbers, vocabulary), create_empty_token=False, show_progress=False)
        index.save(folder, show_progress=False)

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        documents, index, stop = self._open()
        answers = []
        for query in queries:
            known = index.get_tokens_ids(list(index_words(query, stop))[:MAX_WORDS])
            best = top(index.get_scores_from_ids(known), topk) if known else []
            answers.append([Hit(*documents[number], score) for number, score in best])
        return answers


def words(text: str) -> list[str]:
    """The words of a document or a query. Accents, case and a plural s are ignored, and Chinese and
    Japanese, which have no spaces, are split into characters.

    >>> words("García Márquez's cities, 東京")
    ['garcia', 'marquez', 's', 'city', '東', '京']
    """
    return [singular(word) for word in _WORD.findall(plain(text))]


def plain(text: str) -> str:
    """Lower case without accents."""
    if text.isascii():
        return text.lower()
    folded = unicodedata.normalize("NFKC", text).casefold()
    apart = unicodedata.normalize("NFKD", folded)
    kept = "".join(letter for letter in apart if not unicodedata.combining(letter))
    return unicodedata.normalize("NFC", kept)  # Hangul syllables were taken apart: join them


def singular(word: str) -> str:
    """The plural s dropped, three rules in order (Harman's S-stemmer); other words as they are.

    >>> [singular(word) for word in ("queries", "bees", "rivers", "glass", "virus", "is")]
    ['query', 'bee', 'river', 'glass', 'virus', 'is']
    """
    if len(word) < 4 or not word.endswith("s"):
        return word
    if word.endswith("ies") and word[-4] not in "ae":
        return word[:-3] + "y"
    if word.endswith("es") and word[-3] not in "aeo":
        return word[:-1]
    return word if word[-2] in "us" else word[:-1]


def index_words(text: str, stop: frozenset[str]) -> Iterator[str]:
    return (word for word in words(text) if word not in stop)


def top(score_D: np.ndarray, topk: int) -> list[tuple[int, float]]:
    """The `topk` best positions with their scores, zeros left out, equal ones in order.

    >>> top(np.array([0.0, 2.0, 5.0, 2.0]), 2)
    [(2, 5.0), (1, 2.0)]
    """
    least = np.partition(score_D, -topk)[-topk] if 0 < topk < len(score_D) else 0.0
    found = np.flatnonzero((score_D >= least) & (score_D > 0))
    order = np.argsort(-score_D[found], kind="stable")[:topk]
    return [(int(number), float(score_D[number])) for number in found[order]]


def _library() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise ImportError(
            'search with source="bm25" needs the bm25s package: pip install "graft-rl[search]"'
        ) from error
    return bm25s
