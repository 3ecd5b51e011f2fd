"""The words of a text, as BM25 counts them. Documents and queries go through the same function.

Accents, case and a plural s are ignored, and Chinese and Japanese, which have no spaces, are split
into characters.
"""

from __future__ import annotations

import re
import unicodedata

VERSION = 1
"""Part of every index's name: increase it when `words` changes, and indexes are rebuilt."""

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")


def words(text: str) -> list[str]:
    """
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
