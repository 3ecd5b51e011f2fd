"""Which tokens the next forward computes: oldest requests first, no request waits for a full batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from graft.engine.errors import EngineError
from graft.engine.native.drafts.verification import Draft
from graft.engine.native.kv.sequences import Sequence, SequenceTree
from graft.engine.native.request import SampleRequest

MAX_STEPWISE = 8
"""Tokens not drawn by the model, such as a description or a short tool result, that a sequence computes
one per step beside the decoding ones: it keeps its slot, and their pages need not be gathered anew."""


@dataclass(slots=True)
class PlannedWork:
    """Compute the next `count` tokens of `sequence`; then draw one for `request`, if any.

    With a draft its tokens are computed too, and draws after each of them follow.
    """

    sequence: Sequence
    count: int
    request: SampleRequest | None
    draft: Draft | None = None

    @property
    def tokens(self) -> list[int]:
        """The tokens to compute."""
        sequence = self.sequence
        tokens = sequence.tokens[sequence.cached : sequence.cached + self.count]
        return tokens if self.draft is None else tokens + self.draft.tokens

    @property
    def num_tokens(self) -> int:
        return self.count if self.draft is None else self.count + len(self.draft.tokens)


class BurstPlan(NamedTuple):
    """How many steps may follow without a new plan, and what the host decides on the way."""

    steps: int
    """In all."""
    segment: int
    """Steps after which the host reads the draws."""
    go_on: Callable[[], bool]
    """Whether another segment should start."""
    plan_ahead: Callable[[], list[PlannedWork]]
    """What is computed behind the last segment."""
    draws: int = 1
    """Of a row, at most, where it may draw several in a step; there are pages for them."""


class Scheduler:
    """Two queues in order of arrival: `running` takes part in every step, `waiting` not yet.

    A running request that lacks only its last token computes it (decode); longer gaps (prompts, tool
    results, stems) are filled in chunks of `prefill_chunk` tokens per step altogether. When pages run
    out, contexts without a sample in progress lose theirs, then the youngest running requests do.
    With `separate_prefill` a step that fills a gap leaves its last token to a decode step, which draws.
    """

    def __init__(
        self,
        tree: SequenceTree,
        *,
        prefill_chunk: int,
        max_running: int,
        separate_prefill: bool = False,
    ) -> None:
        self.tree, self.prefill_chunk, self.max_running = tree, prefill_chunk, max_running
        self.separate_prefill = separate_prefill
        self.waiting: deque[SampleRequest] = deque()
        self.running: list[SampleRequest] = []
        self.evictions = 0
        self.preemptions = 0

    def add(self, request: SampleRequest) -> None:
        self.waiting.append(request)

    @property
    def requests(self) -> list[SampleRequest]:
        """All unfinished requests, oldest first."""
        return [r for r in (*self.running, *self.waiting) if not r.is_over]

    def plan(self) -> list[PlannedWork]:
        """The work of the next step, with its pages reserved; empty only if no request is unfinished.

        A request that can never fit is failed here.
        """
        self.running = [r for r in self.running if not r.is_over]
        self.tree.clock = clock = self.tree.clock + 1
        self._admit()
        works: list[PlannedWork] = []
        planned: set[Sequence] = set()
        budget = self.prefill_chunk
        may_step = not self.separate_prefill and self._mostly_decoding()
        index = 0
        while index < len(self.running):  # a preemption shortens the list at its end
            request = self.running[index]
            index += 1
            sequence = request.sequence
            gap = len(sequence.tokens) - sequence.cached
            if gap == 1 and sequence.cached < sequence.writable:  # the usual case: kept fast
                sequence.last_used = clock
                works.append(PlannedWork(sequence, 1, request))
                continue
            sequence = self.tree.next_to_compute(sequence)
            if sequence in planned:
                continue  # a sibling computes our stem in this step
            gap = len(sequence.tokens) - sequence.cached
            is_own = sequence is request.sequence
            fill = gap - 1 if self.separate_prefill and is_own else gap
            if gap <= MAX_STEPWISE and is_own and sequence.cached and may_step:
                fill = 1
            count = 1 if gap == 1 else min(fill, budget)
            if count == 0:
                continue
            end = sequence.cached + count
            if end > sequence.writable and not self._reserve_pages(request, sequence, end):
                continue
            if gap > 1:
                budget -= count
            planned.add(sequence)
            sequence.last_used = self.tree.clock
            draws = count == gap and is_own
            works.append(PlannedWork(sequence, count, request if draws else None))
        if not works and self.requests:
            return self.plan()  # all of `running` was failed; plan the waiting ones
        return works

    def plan_ahead(self) -> list[PlannedWork]:
        """Gaps of waiting requests, to be filled behind steps that still run; they are running then.

        Only from free pages: those steps read and write the pages of all others.
        """
        works: list[PlannedWork] = []
        planned: set[Sequence] = set()
        budget, free = self.prefill_chunk, self.tree.pages.free
        needed = len(self.running)  # a page each, to grow; what their steps write is reserved
        while self.waiting and budget and len(self.running) < self.max_running:
            request = self.waiting[0]
            if request.is_over:
                self.waiting.popleft()
                continue
            needed += self._pages_needed(request.sequence)
            if needed > free:
                break
            self.running.append(self.waiting.popleft())
            sequence = self.tree.next_to_compute(request.sequence)
            gap = len(sequence.tokens) - sequence.cached - (sequence is request.sequence)
            count = min(gap, budget)
            if not count or sequence in planned:
                continue
            if self.tree.reserve(sequence, sequence.cached + count):
                budget -= count
                planned.add(sequence)
                sequence.last_used = self.tree.clock
                works.append(PlannedWork(sequence, count, None))
        return works

    def _mostly_decoding(self) -> bool:
        """Whether most running requests lack only the token they have just drawn."""
        sequences = [request.sequence for request in self.running]
        return 2 * sum(len(s.tokens) == s.cached + 1 for s in sequences) >= len(sequences)

    def reserve_ahead(self, works: list[PlannedWork], steps: int) -> int:
        """Reserve pages for up to `steps` draws of every work that draws; the number that fits.

        No request gets more than its budget. Idle contexts are evicted for it; no request is preempted
        for a longer burst.
        """
        drawing = [
            (work.sequence, work.request.budget_left) for work in works if work.request is not None
        ]
        steps = min(steps, max((budget for _, budget in drawing), default=1))
        while steps > 1:
            ends = [(s, s.cached + min(steps, budget)) for s, budget in drawing]
            short = [(s, end) for s, end in ends if end > s.writable]
            missing = sum(self.tree.missing_pages(s, end) for s, end in short)
            free = self.tree.pages.free
            if missing <= free or self._evict(self._idle(), missing - free):
                missing = sum(self.tree.missing_pages(s, end) for s, end in short)
            fits = missing <= self.tree.pages.free
            if fits and all(self.tree.reserve(sequence, end) for sequence, end in short):
                return steps  # else slots of states are short
            steps //= 2
        return 1

    def _admit(self) -> None:
        """Start waiting requests while there are pages for what they still have to compute."""
        if not self.waiting:
            return
        pages = self.tree.pages
        needed = sum(self._pages_needed(request.sequence) for request in self.running)
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            if request.is_over:
                self.waiting.popleft()
                continue
            needed += self._pages_needed(request.sequence)
            is_short = needed > pages.free and needed > pages.free + self._reclaimable()
            if is_short and self.running:
                return
            self.running.append(self.waiting.popleft())

    def _pages_needed(self, sequence: Sequence) -> int:
        """Pages to compute its tokens, and one to grow: without it a new request is preempted at once.

        Siblings on an unfinished stem each count all of it: a few start a step later.
        """
        stem = sequence.stem
        shared = 0
        if stem is not None and sequence.cached < len(stem.tokens) == stem.cached:
            shared = stem.cached // self.tree.pages.size
        return self.tree.missing_pages(sequence, len(sequence.tokens)) - shared + 1

    def _reserve_pages(self, request: SampleRequest, sequence: Sequence, length: int) -> bool:
        """Reserve pages up to `length`, by eviction or preemption where necessary.

        False if the request has to wait for older ones, or if it was failed.
        """
        pages = self.tree.pages
        while not self.tree.reserve(sequence, length):
            short = self.tree.missing_pages(sequence, length) - pages.free
            if self._evict(self._idle(), max(short, 1)):  # 1: state slots are short
                continue
            youngest = self.running[-1]
            if youngest is not request:
                self.running.pop()
                self.waiting.appendleft(youngest)
                self.tree.drop(youngest.sequence)
                self.preemptions += 1
                continue
            if len(self.running) > 1:
                return False
            if self._evict(self._adopted_stems(sequence), max(short, 1)):
                continue
            request.fail(
                EngineError(
                    f"a context of {length} tokens needs {-(-length // pages.size)} KV pages of "
                    f"{pages.size} tokens, and the pool has {pages.total} "
                    f"({pages.total * pages.size} tokens); raise engine.kv_tokens or shorten the "
                    f"context"
                )
            )
            return False
        return True

    def _evict(self, sequences: list[Sequence], short: int) -> bool:
        """Drop the least recently used until `short` more pages are free; False if none was dropped."""
        pages = self.tree.pages
        target = pages.free + short
        dropped = False
        for sequence in sorted(sequences, key=lambda s: s.last_used):
            if pages.free >= target:
                break
            self.tree.drop(sequence)
            self.evictions += 1
            dropped = True
        return dropped

    def _idle(self) -> list[Sequence]:
        """Sequences with pages, other than those of running requests and their stems."""
        busy: set[Sequence] = set()
        for request in self.running:
            node: Sequence | None = request.sequence
            while node is not None and node not in busy:
                busy.add(node)
                node = node.stem
        return [s for s in self.tree.sequences if s.pages and s not in busy]

    def _reclaimable(self) -> int:
        """Pages that evicting every idle sequence would free."""
        held = {page for s in self._idle() for page in s.pages[s.freed :]}
        busy = {page for request in self.running for page in request.sequence.pages}
        return len(held - busy)

    def _adopted_stems(self, sequence: Sequence) -> list[Sequence]:
        """Stems that are no longer needed: `sequence` itself holds all their full pages."""
        stems: list[Sequence] = []
        node = sequence.stem
        while node is not None:
            if node.pages and sequence.cached >= len(node.tokens):
                stems.append(node)
            node = node.stem
        return stems
