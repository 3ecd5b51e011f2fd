"""Sequences that share a prefix share its pages.

A fork freezes the common tokens as a *stem*, a sequence that is never sampled from:

    open "abcdef" (pages of 4), fork twice        stem "abcde"   pages [1 2]
                                                  ├── "abcdef"
                                                  ├── "abcdef"
                                                  └── "abcdef"
    The stem is computed once. A child adopts pages 1 and 2 by reference, and when it writes "f"
    into the half-full page 2 it first takes its own copy: pages [1 3].

A stem ends one token before the fork, since every child computes the last token itself to get its
logits. A sequence that loses its pages (eviction, preemption, new weights) is computed again, stems
first, so that siblings share again.

Where every layer has a window, pages that no later token sees are released as a sequence grows, and are
PAD_PAGE in it; a fork from so early that it would see them is computed again.

In models with recurrent layers a sequence has slots for their states and rows too (`states`), which are
taken, shared and released with its pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from graft.engine.native.kv.pages import PAD_PAGE, Pages
from graft.engine.native.kv.states import Carried, States
from graft.models.recurrence import CHUNK
from graft.models.tree.path_blocks import SEGMENT

ROWS = 1024
"""Rows of the table before it grows."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, and the pages that hold the keys and values of the first `cached` of them.

    `cached` is 0 or at least the length of the stem. `row` is its row in `SequenceTree.table`. Positions
    from `cached` to `writable` lie in pages that no other sequence writes to: the sequence that was
    forked continues in the half-full page, its siblings take copies.
    """

    tokens: list[int]
    stem: Sequence | None
    row: int
    pages: list[int] = field(default_factory=list[int])
    cached: int = 0
    writable: int = 0
    freed: int = 0  # first pages, which no token after `cached` sees
    num_children: int = 0  # sequences whose stem this is
    last_used: int = 0  # the step that last computed or adopted it
    carried: Carried = field(default_factory=Carried)


class SequenceTree:
    """All open sequences, and the table of their pages, one row each, which batches index."""

    def __init__(self, pages: Pages, states: States | None = None) -> None:
        """`states` of models with recurrent layers."""
        self.pages, self.states = pages, states
        self.sequences: dict[Sequence, None] = {}  # an ordered set
        # [rows, longest sequence in pages]; both grow by doubling
        self.table = np.full((ROWS, 16), PAD_PAGE, dtype=np.int64)
        self._rows = list(range(ROWS - 1, -1, -1))
        self.clock = 0

    def open(self, tokens: list[int], stem: Sequence | None = None) -> Sequence:
        if not self._rows:
            rows = len(self.table)
            self.table = np.concatenate([self.table, np.full_like(self.table, PAD_PAGE)])
            self._rows = list(range(2 * rows - 1, rows - 1, -1))
        sequence = Sequence(tokens, stem, self._rows.pop())
        self.sequences[sequence] = None
        if stem is not None:
            stem.num_children += 1
        return sequence

    def close(self, sequence: Sequence) -> None:
        """Release its pages and its row; a stem is closed with its last child."""
        closing: Sequence | None = sequence
        while closing is not None:
            self.drop(closing)
            del self.sequences[closing]
            self._rows.append(closing.row)
            stem = closing.stem
            if stem is not None:
                stem.num_children -= 1
            closing = stem if stem is not None and stem.num_children == 0 else None

    def fork(self, sequence: Sequence, at: int | None = None) -> Sequence:
        """A sequence with the first `at` tokens (None: all); both share one stem from now on.

        At an earlier token the stem is inserted between existing ones: stems "abc", "abcdef" under
        "abcdefgh" forked at 5 become "abc", "abcd" (new), "abcdef", and the stem of "abcde" is "abcd".
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

    def next_to_compute(self, sequence: Sequence) -> Sequence:
        """What to compute next so that `sequence` can continue: itself, or one of its stems."""
        while (stem := sequence.stem) is not None and sequence.cached < len(stem.tokens):
            if stem.cached == len(stem.tokens):
                self.drop(sequence)
                self._adopt(sequence, stem, stem.cached)
                stem.last_used = sequence.last_used = self.clock
                break
            sequence = stem
        return sequence

    def missing_pages(self, sequence: Sequence, length: int) -> int:
        """Pages to take before positions `cached` to `length` can be written."""
        whole = -(-length // self.pages.size) - len(sequence.pages)
        return whole + (self._shared_tail(sequence) is not None)

    def reserve(self, sequence: Sequence, length: int) -> bool:
        """Make positions `cached` to `length` writable; False, and no change, if pages are short.

        Pages that these positions do not see are released first.
        """
        self._free_unseen(sequence)
        missing = self.missing_pages(sequence, length)
        if missing > self.pages.free or not self._reserve_states(sequence, length):
            return False
        tail = self._shared_tail(sequence)
        if tail is not None:  # half-full, and another sequence may write here: take a copy
            own = self.pages.take(1)
            self.pages.copy_later(sequence.pages[tail], own[0])
            self.pages.release([sequence.pages[tail]])
            sequence.pages[tail] = own[0]
            self.table[sequence.row, tail] = own[0]
            missing -= 1
        if missing:
            self._extend(sequence, self.pages.take(missing))
        sequence.writable = len(sequence.pages) * self.pages.size
        if self.states is not None:
            sequence.writable = min(
                sequence.writable, self.states.reserved(sequence.cached, length)
            )
        return True

    def flush_copies(self) -> None:
        """Make the copies that `reserve` has promised, before anything is written."""
        self.pages.flush_copies()
        if self.states is not None:
            self.states.flush_copies()

    def advance(self, sequence: Sequence, count: int) -> None:
        """Count `count` more tokens, which a burst has computed in slots that are reserved."""
        stop = sequence.cached + count
        if self.states is not None:
            self.states.step(sequence.carried, sequence.cached, count)
            if stop // CHUNK > sequence.cached // CHUNK:  # the end of this chunk has no slot yet
                sequence.writable = min(sequence.writable, stop)
        sequence.cached = stop

    def _reserve_states(self, sequence: Sequence, length: int) -> bool:
        """Slots for the states; those that nobody goes on from are dropped for it."""
        if self.states is None:
            return True
        if not self.states.states.free:
            oldest = sorted(self.sequences, key=lambda each: each.last_used)
            self.states.make_room(each.carried for each in oldest)
        return self.states.reserve(sequence.carried, sequence.cached, length)

    def drop(self, sequence: Sequence) -> None:
        """Release its pages; keys and values are computed again on next use."""
        if sequence.pages:
            self.pages.release(sequence.pages[sequence.freed :])
            self.table[sequence.row, : len(sequence.pages)] = PAD_PAGE
            sequence.pages = []
        if self.states is not None:
            self.states.drop(sequence.carried)
        sequence.cached = sequence.writable = sequence.freed = 0

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Remove the tokens after `length`, and their pages."""
        del sequence.tokens[length:]
        cached = self._reach(sequence, sequence, min(sequence.cached, length - 1))
        # without pages it would be no candidate for eviction, and keep what it has of slots
        if not cached or sequence.freed > self._num_unseen(cached):
            self.drop(sequence)
            return
        keep = -(-cached // self.pages.size)
        self.pages.release(sequence.pages[keep:])
        self.table[sequence.row, keep : len(sequence.pages)] = PAD_PAGE
        del sequence.pages[keep:]
        sequence.cached = cached
        sequence.writable = min(sequence.writable, keep * self.pages.size)
        if self.states is not None:
            sequence.writable = 0
            self.states.rewind(sequence.carried, cached)

    def _insert_stem(self, above: Sequence, length: int) -> Sequence:
        """A stem of the first `length` tokens, inserted between `above` and its stem."""
        stem = self.open(above.tokens[:length], above.stem)
        if above.stem is not None:
            above.stem.num_children -= 1  # now reached through the new stem
        above.stem = stem
        stem.num_children = 1
        stem.last_used = above.last_used
        self._adopt(stem, above, min(above.cached, length))
        if above.cached < length:
            self.drop(above)  # the rest is computed in the stem, then adopted
        return stem

    def _shared_tail(self, sequence: Sequence) -> int | None:
        """Index of the page that `cached` points into, if another sequence holds it too."""
        index = sequence.cached // self.pages.size
        if index < len(sequence.pages) and self.pages.ref_count(sequence.pages[index]) > 1:
            return index
        return None

    def _num_unseen(self, cached: int) -> int:
        """Pages that no token after the first `cached` sees: whole segments, so that sequences that hold
        the last page of one hold all of it (`segment_sharing`)."""
        if not self.pages.horizon:
            return 0
        positions = max(cached + 1 - self.pages.horizon, 0)
        return positions // (SEGMENT * self.pages.size) * SEGMENT

    def _free_unseen(self, sequence: Sequence) -> None:
        unseen = slice(sequence.freed, self._num_unseen(sequence.cached))
        if unseen.start < unseen.stop:
            self.pages.release(sequence.pages[unseen])
            sequence.pages[unseen] = [PAD_PAGE] * (unseen.stop - unseen.start)
            self.table[sequence.row, unseen] = PAD_PAGE
            sequence.freed = unseen.stop

    def _adopt(self, sequence: Sequence, other: Sequence, cached: int) -> None:
        """Make an empty sequence share the pages of the first `cached` tokens of another, unless it would
        see some that are released."""
        if other.freed > self._num_unseen(cached):
            return
        cached = self._reach(sequence, other, cached)
        if self.states is not None:
            self.states.share(sequence.carried, other.carried, cached)
        shared = other.pages[: -(-cached // self.pages.size)]
        self.pages.share(shared[other.freed :])
        self._extend(sequence, shared)
        sequence.cached, sequence.freed = cached, other.freed

    def _reach(self, sequence: Sequence, other: Sequence, wanted: int) -> int:
        """How many of the first `wanted` tokens of `other` the sequence can begin with: as many as have a
        state; 0 if these are fewer than its stem has."""
        if self.states is None:
            return wanted
        cached = self.states.reach(other.carried, other.cached, wanted)
        stem = 0 if sequence.stem is None else len(sequence.stem.tokens)
        return cached if cached >= stem else 0

    def _extend(self, sequence: Sequence, pages: list[int]) -> None:
        start, stop = len(sequence.pages), len(sequence.pages) + len(pages)
        if stop > self.table.shape[1]:
            wider = np.full((len(self.table), max(stop, 2 * self.table.shape[1])), PAD_PAGE)
            wider[:, : self.table.shape[1]] = self.table
            self.table = wider
        self.table[sequence.row, start:stop] = pages
        sequence.pages.extend(pages)
