"""Proposes drafts for the rows of a step, and learns which of them pay."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from graft.actions.space import ActionSpace
from graft.engine.native.drafts.gain import MAX_DRAFT, Acceptance, RowTimes, choose_counts
from graft.engine.native.drafts.index import DraftSource, Text, TextMatch, TextStore, following
from graft.engine.native.drafts.verification import Draft
from graft.engine.native.kv.sequences import SequenceTree
from graft.engine.native.request import Draw, SampleRequest
from graft.engine.native.scheduler import PlannedWork
from graft.protocols import Grammar

MAX_QUIET = 16
"""Steps without proposals, at most, after some that were not worth their time."""


@dataclass(slots=True)
class DraftCounts:
    """Tokens since the start, by source."""

    proposed: dict[DraftSource, int] = field(default_factory=lambda: dict.fromkeys(DraftSource, 0))
    accepted: dict[DraftSource, int] = field(default_factory=lambda: dict.fromkeys(DraftSource, 0))

    def add(self, source: DraftSource, proposed: int, accepted: int) -> None:
        self.proposed[source] += proposed
        self.accepted[source] += accepted


@dataclass(slots=True)
class Proposal:
    """A draft for a work, before it is known how much of it is worth its time."""

    work: PlannedWork
    draft: Draft
    source: DraftSource
    match: TextMatch
    text: Text
    """Of the work's own sequence."""


class Drafter:
    """Drafts of one engine. A row under a structure is not drafted: its matcher goes on with each draw."""

    def __init__(self, tree: SequenceTree, space: ActionSpace) -> None:
        self.tree, self.space = tree, space
        self.store, self.counts = TextStore(), DraftCounts()
        self.acceptance, self.step_time = Acceptance(), RowTimes()
        self._open: dict[SampleRequest, Proposal] = {}
        self._quiet = self._rest = 0

    def propose(self, works: list[PlannedWork]) -> None:
        """Give a draft to the works for which it pays."""
        self._open = {}
        if self._rest:
            self._rest -= 1
            return
        self.store.begin_round()
        self.acceptance.forget()
        proposals = [proposal for work in works if (proposal := self._proposal(work)) is not None]
        shares = [self.acceptance.share(p.source, p.match.length, p.text) for p in proposals]
        limits = [len(proposal.draft.tokens) for proposal in proposals]
        rows = sum(work.count for work in works)
        counts = choose_counts(shares, limits, rows, self.step_time) if proposals else []
        for proposal, count in zip(proposals, counts, strict=True):
            if count := self._reserve(proposal.work, count, len(works)):
                tokens, modes = proposal.draft
                proposal.work.draft = Draft(tokens[:count], modes[: count + 1])
                request = proposal.work.request
                assert request is not None
                self._open[request] = proposal
        self._quiet = 0 if self._open else min(2 * self._quiet + 1, MAX_QUIET)
        self._rest = self._quiet

    def learn(self, works: list[PlannedWork], draws: Iterable[Draw], seconds: float) -> None:
        """Take over what a step of these works has drawn, and how long it took."""
        if all(work.count == 1 for work in works):
            rows = sum(1 + (0 if w.draft is None else len(w.draft.tokens)) for w in works)
            self.step_time.add(rows, seconds)
        for draw in draws:
            proposal = self._open.get(draw.request)
            if proposal is None or proposal.work.draft is None:
                continue
            proposed, accepted = len(proposal.work.draft.tokens), len(draw.actions) - 1
            source, length = proposal.source, proposal.match.length
            self.counts.add(source, proposed, accepted)
            self.acceptance.add(source, length, proposal.text, proposed, accepted)

    def _proposal(self, work: PlannedWork) -> Proposal | None:
        request = work.request
        if request is None or work.count > 1 or request.matcher is not None:
            return None
        sequence = work.sequence
        task, text = self.store.follow(request.task, sequence, request.version)
        limit = min(MAX_DRAFT, request.budget_left - 1)
        match = task.find(sequence.tokens) if limit > 0 else None
        if match is None:
            return None
        draft = walk(request, following(sequence.tokens, match, limit), self.space)
        if not draft.tokens:
            return None
        return Proposal(work, draft, task.source(match.text, sequence), match, text)

    def _reserve(self, work: PlannedWork, count: int, rows: int) -> int:
        """Pages for drafted tokens, from free ones that the rows do not need; how many tokens fit."""
        sequence, tree = work.sequence, self.tree
        end = sequence.cached + 1 + count
        if end > sequence.writable:
            missing = tree.missing_pages(sequence, end)
            if missing > tree.pages.free - rows or not tree.reserve(sequence, end):
                return max(min(count, sequence.writable - sequence.cached - 1), 0)
        return count


def walk(request: SampleRequest, tokens: list[int], space: ActionSpace) -> Draft:
    """The draft as far as the request's grammar lets its tokens be drawn one by one.

    A token that may not be drawn ends it, as does one that writes a description or exits.
    """
    grammar, mode = request.grammar, request.mode
    modes = [mode]
    if grammar is None:
        return Draft(tokens, modes * (len(tokens) + 1))
    for token in tokens:
        is_allowed = space.allowed is None or space.allowed[mode][token]
        if not is_allowed or not _is_plain(grammar, mode, token):
            break
        mode = grammar.step(mode, token)
        if not 0 <= mode < space.num_modes:
            break
        modes.append(mode)
    return Draft(tokens[: len(modes) - 1], modes)


def _is_plain(grammar: Grammar, mode: int, token: int) -> bool:
    """Whether the token writes itself alone, and the sample goes on."""
    return [*grammar.written(mode, token)] == [token] and not grammar.is_exit(mode, token)
