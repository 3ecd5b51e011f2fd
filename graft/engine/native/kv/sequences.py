"""Sequences that share their past share its pages.

A fork freezes the common past as a *stem*, a sequence nobody samples from:

    open "abcdef" (pages of 4), fork twice        stem "abcde"   pages [1 2]
                                                  ├── "abcdef"
                                                  ├── "abcdef"
                                                  └── "abcdef"
    The stem is computed once. A child adopts pages 1 and 2 by reference, and when it writes "f"
    into the half-full page 2 it first takes its own copy: pages [1 3].

A stem ends one token before the fork, since every child computes the last token itself to get its
logits. Losing pages (eviction, preemption, new weights) costs time only: what is not cached is
computed again, stems first, so that siblings share again.
"""

from __future__ import annotations

import numpy as np

from graft.engine.native.kv.pages import NOBODY, Pages

ROWS = 1024
"""Sequences that the table has lines for before it grows."""


class Sequence:
    """Tokens, and the pages that hold the keys and values of the first `cached` of them.

    `cached` is 0 or at least the length of the stem. `row` is its line in `SequenceTree.table`. Positions
    from `cached` to `writable` lie in pages that nobody else writes to: the one who was there
    before a fork goes on in the half-full page, its siblings take copies.
    """

    __slots__ = ("cached", "pages", "row", "stem", "tokens", "used", "users", "writable")

    def __init__(self, tokens: list[int], stem: Sequence | None, row: int) -> None:
        self.tokens, self.stem, self.row = tokens, stem, row
        self.pages: list[int] = []
        self.cached = self.writable = 0
        self.users = 0  # sequences that stand on this one, if it is a stem
        self.used = 0  # the step that last computed or adopted it


class SequenceTree:
    """All living sequences, and the table of their pages, one line each, for the batch to index."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.sequences: dict[Sequence, None] = {}  # an ordered set
        # [rows, longest sequence in pages]; both grow by doubling
        self.table = np.full((ROWS, 16), NOBODY, dtype=np.int64)
        self._rows = list(range(ROWS - 1, -1, -1))
        self.clock = 0

    def open(self, tokens: list[int], stem: Sequence | None = None) -> Sequence:
        if not self._rows:
            rows = len(self.table)
            self.table = np.concatenate([self.table, np.full_like(self.table, NOBODY)])
            self._rows = list(range(2 * rows - 1, rows - 1, -1))
        sequence = Sequence(tokens, stem, self._rows.pop())
        self.sequences[sequence] = None
        if stem is not None:
            stem.users += 1
        return sequence

    def close(self, sequence: Sequence) -> None:
        """Give back its pages and its line; stems go with the last sequence that stood on them."""
        closing: Sequence | None = sequence
        while closing is not None:
            self.drop(closing)
            del self.sequences[closing]
            self._rows.append(closing.row)
            stem = closing.stem
            if stem is not None:
                stem.users -= 1
            closing = stem if stem is not None and stem.users == 0 else None

    def fork(self, sequence: Sequence, at: int | None = None) -> Sequence:
        """A sequence with the first `at` tokens (None: all); both stand on one stem from now on.

        In the past the stem is put where it belongs on the way to the root: stems "abc", "abcdef"
        under "abcdefgh" forked at 5 become "abc", "abcd" (new), "abcdef", and "abcde" stands on
        "abcd".
        """
        tokens = sequence.tokens[:at]
        length = len(tokens) - 1
        above = sequence  # whose stem is the new sequence's, or ends before it
        while above.stem is not None and len(above.stem.tokens) > length:
            above = above.stem
        stem = above.stem
        if length > 0 and (stem is None or len(stem.tokens) < length):
            stem = self._insert_stem(above, length)
        return self.open(tokens, stem)

    def ready(self, sequence: Sequence) -> Sequence:
        """What to compute next so that `sequence` can go on: itself, or a stem below it."""
        while (stem := sequence.stem) is not None and sequence.cached < len(stem.tokens):
            if stem.cached == len(stem.tokens):
                self.drop(sequence)
                self._point(sequence, stem.pages, stem.cached)
                stem.used = sequence.used = self.clock
                break
            sequence = stem
        return sequence

    def missing(self, sequence: Sequence, length: int) -> int:
        """Pages to take before positions `cached` to `length` can be written."""
        whole = -(-length // self.pages.size) - len(sequence.pages)
        return whole + (self._shared_tail(sequence) is not None)

    def reserve(self, sequence: Sequence, length: int) -> bool:
        """Make positions `cached` to `length` writable, or change nothing and say False."""
        missing = self.missing(sequence, length)
        if missing > self.pages.free:
            return False
        tail = self._shared_tail(sequence)
        if tail is not None:  # half-full, and somebody else may be writing here: take a copy
            own = self.pages.take(1)
            self.pages.copy_later(sequence.pages[tail], own[0])
            self.pages.release([sequence.pages[tail]])
            sequence.pages[tail] = own[0]
            self.table[sequence.row, tail] = own[0]
            missing -= 1
        if missing:
            self._extend(sequence, self.pages.take(missing))
        sequence.writable = len(sequence.pages) * self.pages.size
        return True

    def drop(self, sequence: Sequence) -> None:
        """Forget its keys and values; they are computed again on next use."""
        if sequence.pages:
            self.pages.release(sequence.pages)
            self.table[sequence.row, : len(sequence.pages)] = NOBODY
            sequence.pages = []
        sequence.cached = sequence.writable = 0

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Take back the tokens after `length`, with their pages."""
        del sequence.tokens[length:]
        cached = min(sequence.cached, length - 1)
        keep = -(-cached // self.pages.size)
        self.pages.release(sequence.pages[keep:])
        self.table[sequence.row, keep : len(sequence.pages)] = NOBODY
        del sequence.pages[keep:]
        sequence.cached = cached
        sequence.writable = min(sequence.writable, keep * self.pages.size)

    def _insert_stem(self, above: Sequence, length: int) -> Sequence:
        """A stem of the first `length` tokens between `above` and what it stood on."""
        stem = self.open(above.tokens[:length], above.stem)
        if above.stem is not None:
            above.stem.users -= 1  # now reached through the new stem
        above.stem = stem
        stem.users = 1
        stem.used = above.used
        self._point(stem, above.pages, min(above.cached, length))
        if above.cached < length:
            self.drop(above)  # the rest is computed in the stem, then adopted
        return stem

    def _shared_tail(self, sequence: Sequence) -> int | None:
        """Index of the page that `cached` points into, if another sequence holds it too."""
        index = sequence.cached // self.pages.size
        if index < len(sequence.pages) and self.pages.holders(sequence.pages[index]) > 1:
            return index
        return None

    def _point(self, sequence: Sequence, pages: list[int], cached: int) -> None:
        """Let an empty sequence hold the pages of the first `cached` tokens of another."""
        shared = pages[: -(-cached // self.pages.size)]
        self.pages.share(shared)
        self._extend(sequence, shared)
        sequence.cached = cached

    def _extend(self, sequence: Sequence, pages: list[int]) -> None:
        start, stop = len(sequence.pages), len(sequence.pages) + len(pages)
        if stop > self.table.shape[1]:
            wider = np.full((len(self.table), max(stop, 2 * self.table.shape[1])), NOBODY)
            wider[:, : self.table.shape[1]] = self.table
            self.table = wider
        self.table[sequence.row, start:stop] = pages
        sequence.pages.extend(pages)
