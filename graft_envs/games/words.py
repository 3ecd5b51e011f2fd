"""English words for the word games: a short list for secrets, a long one to check guesses.

    basic()     3,700 of the most common words, 3 to 10 letters
    full()      62,900 words, 3 to 15 letters, American and British spelling; contains basic()

All are lower-case ASCII, sorted by length and then by letter, so a seed picks the same word on every
machine. Source and licence: data/LICENSE-scowl.txt.
"""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path

DATA = Path(__file__).parent / "data"


@cache
def basic(length: int | None = None) -> tuple[str, ...]:
    """The common words, or those of one length: basic(3) -> ("act", "add", "age", ...)."""
    if length is not None:
        return tuple(word for word in basic() if len(word) == length)
    return tuple((DATA / "words-basic.txt").read_text("ascii").split())


@cache
def full(length: int | None = None) -> tuple[str, ...]:
    """The long list, or its words of one length: full(3) -> ("ace", "act", "add", ...)."""
    if length is not None:
        return tuple(word for word in full() if len(word) == length)
    return tuple(gzip.decompress((DATA / "words-full.txt.gz").read_bytes()).decode("ascii").split())


@cache
def dictionary(length: int) -> frozenset[str]:
    """The words of `full(length)` as a set."""
    return frozenset(full(length))


def check_length(length: int, known: tuple[str, ...]) -> None:
    """A ValueError if `known` has no word that long."""
    shortest, longest = len(known[0]), len(known[-1])
    if not shortest <= length <= longest:
        raise ValueError(
            f"word_length={length}: the word list has words of {shortest} to {longest} letters"
        )
