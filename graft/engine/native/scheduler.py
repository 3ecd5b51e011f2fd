"""Which tokens the next forward computes: oldest requests first, nobody waits for a batch."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from graft.engine.errors import EngineError
from graft.engine.native.kv.sequences import Sequence, SequenceTree
from graft.engine.stop_strings import StopStrings
from graft.protocols import Grammar
from graft.types import Completion, Finish, Sampling

FEW = 8
"""Tokens that somebody else wrote, such as a description or a short answer, which a sequence takes in
one a step beside those that draw: it keeps its place among them, and they need not be gathered anew."""


@dataclass(slots=True, eq=False)
class SampleRequest:
    """One `sample` on its way: what was asked, and what has been written so far."""

    sequence: Sequence
    key: int
    sampling: Sampling
    stop_tokens: frozenset[int]
    stop_strings: StopStrings | None
    grammar: Grammar | None
    mode: int
    room: int
    """How many tokens it may write: `max_tokens`, or what is left of the model's window."""
    version: int
    """Of the weights when it began; the staleness of its oldest token."""
    future: asyncio.Future[Completion]
    start: int = 0
    said_from: int = 0
    """Where stop strings are looked for: `start`, or earlier if it goes on with an earlier sample."""
    actions: list[int] = field(default_factory=list[int])
    """Kept where a grammar may make them differ from the tokens."""
    logprobs: list[float] = field(default_factory=list[float])
    entropies: list[float] = field(default_factory=list[float])
    modes: list[int] = field(default_factory=list[int])
    is_over: bool = False

    def __post_init__(self) -> None:
        self.start = len(self.sequence.tokens)
        self.said_from = max(self.start - self.sampling.begun, 0)

    def finish(self, finish: Finish) -> None:
        tokens = self.sequence.tokens[self.start :]
        self.is_over = True
        if not self.future.done():  # the caller may have given up waiting
            self.future.set_result(
                Completion(
                    tokens,
                    list(tokens) if self.grammar is None else self.actions,
                    self.logprobs,
                    self.entropies,
                    self.modes,
                    finish,
                    self.version,
                )
            )

    def fail(self, error: BaseException) -> None:
        self.is_over = True
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(slots=True)
class PlannedWork:
    """Compute the next `count` tokens of `sequence`; then draw one for `request`, if any."""

    sequence: Sequence
    count: int
    request: SampleRequest | None


class Scheduler:
    """Two queues in order of arrival: `running` has a share of every step, `waiting` none yet.

    Every running request that only lacks its last token gets it (decode); longer gaps (prompts,
    tool results, stems) are filled in chunks of `prefill_chunk` tokens per step altogether. When
    pages run out, contexts nobody samples from lose theirs, then the youngest running requests do.
    With `draws_apart` a step that fills a gap leaves its last token to a decode, which draws.
    """

    def __init__(
        self, tree: SequenceTree, *, prefill_chunk: int, max_running: int, draws_apart: bool = False
    ) -> None:
        self.tree, self.prefill_chunk, self.max_running = tree, prefill_chunk, max_running
        self.draws_apart = draws_apart
        self.waiting: deque[SampleRequest] = deque()
        self.running: list[SampleRequest] = []
        self.evictions = 0
        self.preemptions = 0

    def add(self, request: SampleRequest) -> None:
        self.waiting.append(request)

    @property
    def requests(self) -> list[SampleRequest]:
        """Everything under way, oldest first."""
        return [r for r in (*self.running, *self.waiting) if not r.is_over]

    def plan(self) -> list[PlannedWork]:
        """The work of the next step, with its pages reserved.

        Empty only if nothing is under way. A request that can never fit is failed here.
        """
        self.running = [r for r in self.running if not r.is_over]
        self.tree.clock = clock = self.tree.clock + 1
        self._admit()
        works: list[PlannedWork] = []
        planned: set[Sequence] = set()
        budget = self.prefill_chunk
        may_ride = not self.draws_apart and self._mostly_drawing()
        index = 0
        while index < len(self.running):  # the list shrinks at its end when somebody is preempted
            request = self.running[index]
            index += 1
            sequence = request.sequence
            gap = len(sequence.tokens) - sequence.cached
            if gap == 1 and sequence.cached < sequence.writable:  # the usual case, and quick
                sequence.used = clock
                works.append(PlannedWork(sequence, 1, request))
                continue
            sequence = self.tree.ready(sequence)
            if sequence in planned:
                continue  # a sibling computes our stem in this very step
            gap = len(sequence.tokens) - sequence.cached
            is_own = sequence is request.sequence
            fill = gap - 1 if self.draws_apart and is_own else gap
            if gap <= FEW and is_own and sequence.cached and may_ride:
                fill = 1
            count = 1 if gap == 1 else min(fill, budget)
            if count == 0:
                continue
            end = sequence.cached + count
            if end > sequence.writable and not self._make_room(request, sequence, end):
                continue
            if gap > 1:
                budget -= count
            planned.add(sequence)
            sequence.used = self.tree.clock
            draws = count == gap and is_own
            works.append(PlannedWork(sequence, count, request if draws else None))
        if not works and self.requests:
            return self.plan()  # everybody in `running` was failed; the next ones get their turn
        return works

    def _mostly_drawing(self) -> bool:
        """Whether most of those who run lack nothing but the token they have just drawn."""
        sequences = [request.sequence for request in self.running]
        return 2 * sum(len(s.tokens) == s.cached + 1 for s in sequences) >= len(sequences)

    def look_ahead(self, works: list[PlannedWork], steps: int) -> int:
        """Reserve room for up to `steps` draws of every work that draws; how many there is room for.

        Nobody gets more than it may still draw. Idle contexts give way; nobody is preempted for the
        sake of a longer burst.
        """
        drawing = [
            (work.sequence, work.request.room - len(work.request.logprobs))
            for work in works
            if work.request is not None
        ]
        steps = min(steps, max((room for _, room in drawing), default=1))
        while steps > 1:
            ends = [(s, s.cached + min(steps, room)) for s, room in drawing]
            short = [(s, end) for s, end in ends if end > s.writable]
            missing = sum(self.tree.missing(s, end) for s, end in short)
            free = self.tree.pages.free
            if missing <= free or self._evict(self._idle(), missing - free):
                missing = sum(self.tree.missing(s, end) for s, end in short)
            if missing <= self.tree.pages.free:
                for sequence, end in short:
                    self.tree.reserve(sequence, end)
                return steps
            steps //= 2
        return 1

    def _admit(self) -> None:
        """Move waiting requests up while there is room for what they still have to compute."""
        if not self.waiting:
            return
        pages = self.tree.pages
        needed = sum(self._needed(request.sequence) for request in self.running)
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            if request.is_over:
                self.waiting.popleft()
                continue
            needed += self._needed(request.sequence)
            is_short = needed > pages.free and needed > pages.free + self._reclaimable()
            if is_short and self.running:
                return
            self.running.append(self.waiting.popleft())

    def _needed(self, sequence: Sequence) -> int:
        """Pages to compute its tokens, and one to grow; without it newcomers are preempted at once.

        Siblings on an unfinished stem each count all of it: a few wait a step longer.
        """
        stem = sequence.stem
        shared = 0
        if stem is not None and sequence.cached < len(stem.tokens) == stem.cached:
            shared = stem.cached // self.tree.pages.size
        return self.tree.missing(sequence, len(sequence.tokens)) - shared + 1

    def _make_room(self, request: SampleRequest, sequence: Sequence, length: int) -> bool:
        """Reserve pages up to `length`, taking them from others if need be.

        False if the request has to wait for older ones, or if it has just been failed.
        """
        pages = self.tree.pages
        while not self.tree.reserve(sequence, length):
            short = self.tree.missing(sequence, length) - pages.free
            if self._evict(self._idle(), short):
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
            if self._evict(self._adopted_stems(sequence), short):
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
        """Drop the least recently used until `short` pages came free; False if none had any."""
        pages = self.tree.pages
        target = pages.free + short
        dropped = False
        for sequence in sorted(sequences, key=lambda s: s.used):
            if pages.free >= target:
                break
            self.tree.drop(sequence)
            self.evictions += 1
            dropped = True
        return dropped

    def _idle(self) -> list[Sequence]:
        """Sequences with pages that no running request stands on."""
        busy: set[Sequence] = set()
        for request in self.running:
            node: Sequence | None = request.sequence
            while node is not None and node not in busy:
                busy.add(node)
                node = node.stem
        return [s for s in self.tree.sequences if s.pages and s not in busy]

    def _reclaimable(self) -> int:
        held = {page for sequence in self._idle() for page in sequence.pages}
        busy = {page for request in self.running for page in request.sequence.pages}
        return len(held - busy)

    def _adopted_stems(self, sequence: Sequence) -> list[Sequence]:
        """Stems below that have served: all their full pages are held by `sequence` itself."""
        stems: list[Sequence] = []
        node = sequence.stem
        while node is not None:
            if node.pages and sequence.cached >= len(node.tokens):
                stems.append(node)
            node = node.stem
        return stems
