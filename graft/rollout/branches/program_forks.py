"""ARPO's and AEPO's forks of attempts that programs make, which nobody can copy while they run.

A fork starts the program anew. Its first calls are answered from the record of the attempt that it forks, and
from there on it samples:

    attempt 0    call 0 "I search"   call 1 "Hm, then"   call 2 ... answer
    fork at 1    call 0 (recorded)   call 1 "So it is"   ...  answer          unsure at call 1

An attempt is complete before it forks, so that all of its calls are known; otherwise the rule is that of
`entropy`. Where the first calls of a fork are not those of the record, its program does not repeat itself:
the fork is given up and counted (agent/forks_given_up), and an attempt from the start takes its place.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from graft.rollout.branches.uncertainty import (
    ForkRule,
    first_decisions,
    mean_entropy,
    probability,
    root_budget,
)
from graft.rollout.episode_builder import EpisodeBuilder
from graft.rollout.setup import ProgramAttempt

GIVEN_UP = "agent/forks_given_up"


class ProgramTree:
    """One task's attempts while they fork."""

    def __init__(self, how: ForkRule, builder: EpisodeBuilder) -> None:
        self.how, self.builder = how, builder
        self.vocab_size = builder.setup.engine.vocab_size
        self.in_a_row: dict[ProgramAttempt, int] = {}
        self.rounds_in_a_row = 0

    @property
    def num_remaining(self) -> int:
        """Attempts that may still begin."""
        return self.how.samples - len(self.builder.program_attempts)

    async def grow(self) -> None:
        roots = self.how.initial_rollouts
        complete: list[ProgramAttempt] = []
        if self.how.dynamic:
            complete = await self._run([self.builder.start_program()])
            first, *later = self._entropies(complete[0]) or [0.0]
            after = sum(later) / len(later) if later else 0.0
            roots = root_budget(self.how.samples, self.how.sensitivity, first, after)
        begun = [self.builder.start_program() for _ in range(roots - len(complete))]
        complete += await self._run(begun)
        while complete and self.num_remaining:
            complete = await self._run(self._forks_of(complete))
        await self._run([self.builder.start_program() for _ in range(self.num_remaining)])

    async def _run(self, attempts: Sequence[ProgramAttempt]) -> list[ProgramAttempt]:
        """Complete attempts; those that could not repeat their first calls are taken out."""
        await asyncio.gather(*(one.finish() for one in attempts))
        for one in attempts:
            if one.is_given_up and one.source is not None and one.source.leaf is not None:
                counted = one.source.leaf.metrics
                counted[GIVEN_UP] = counted.get(GIVEN_UP, 0.0) + 1.0
                self.builder.drop_program(one)
        return [one for one in attempts if not one.is_given_up]

    def _entropies(self, attempt: ProgramAttempt) -> list[float]:
        """The entropies of the first tokens of each call."""
        how, size = self.how, self.vocab_size
        return [mean_entropy(first_decisions(spans, how.tokens), size) for spans in attempt.calls]

    def _forks_of(self, complete: Sequence[ProgramAttempt]) -> list[ProgramAttempt]:
        """Forks where these attempts were unsure, call by call, within the budget."""
        known = {one: self._entropies(one) for one in complete}
        forks: list[ProgramAttempt] = []
        for at in range(1, max(map(len, known.values()), default=0)):
            # a fork has none where it began itself: its source has decided there
            here = {
                one: found[at] - found[0]
                for one, found in known.items()
                if len(found) > at and at > one.num_replayed
            }
            order = (
                sorted(here, key=lambda one: -here[one]) if self.how.order == "entropy" else here
            )
            made = [fork for one in order for fork in self._fork(one, at, here[one])]
            if here:
                self.rounds_in_a_row = self.rounds_in_a_row + 1 if made else 0
            forks += made
        return forks

    def _fork(self, attempt: ProgramAttempt, at: int, change: float) -> list[ProgramAttempt]:
        count = self._wanted(attempt, at, change)
        made = [self.builder.start_program(attempt, at) for _ in range(count)]
        in_a_row = self.in_a_row.get(attempt, 0)
        self.in_a_row[attempt] = in_a_row + 1 if made else 0
        self.in_a_row |= dict.fromkeys(made, in_a_row + 1)
        attempt.calls[at][0].info.update(entropy_change=change, forks=len(made))
        return made

    def _wanted(self, attempt: ProgramAttempt, at: int, change: float) -> int:
        """How many forks this attempt should get at a call."""
        how = self.how
        most = min(how.beam_size - 1, self.num_remaining)
        is_path = how.penalty_over == "path"
        in_a_row = self.in_a_row.get(attempt, 0) if is_path else self.rounds_in_a_row
        chance = probability(
            how.branch_probability, how.entropy_weight, change, how.penalty, in_a_row
        )
        if how.rule == "threshold":
            return most if chance > how.threshold else 0
        draws = random.Random(self.builder.key(attempt.number, f"/fork/{at}"))
        return sum(draws.random() < chance for _ in range(most))
