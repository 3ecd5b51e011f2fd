"""ARPO's and AEPO's branch as in the published programs, faults included, for comparison.

    round 1   roots sample a segment, tools answer, all wait for the slowest
              entropy of the segment: a SUM over its first tokens, so that short ones look sure
              its change since the first segment ever seen in this slot, of any prompt
              forks in the order of slots: ARPO  if U - weight * change <= branch_probability
                                           AEPO  if (U + weight * change) * (1 - penalty * rounds in a
                                                 row with a new attempt) >= branch_probability
    round 2   the same with the forks; a prompt without a live attempt gets ONE new root per round

The entropy is that of the segment BEFORE the observation where the fork is made. A slot is a position in
the step's list of attempts; the table of first entropies is never emptied. In AEPO a larger
`branch_probability` makes fewer forks, and the attempt that decides the number of roots is thrown away.

What is not reproduced: docs/branching.md.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graft.rollout.branches.uncertainty import ForkRule, first_decisions, sigmoid
from graft.rollout.episode_builder import EpisodeBuilder
from graft.rollout.failure import RolloutFailure
from graft.rollout.live_trajectory import LiveTrajectory
from graft.types import Author, Episode

Slot = tuple[int, int]
"""The task's position in the step, and the attempt's number at that task."""


@dataclass(slots=True)
class FaithfulBranching:
    """Carries the entropies of slots from step to step, as the programs do and should not."""

    how: ForkRule
    is_aepo: bool
    first_entropies: dict[Slot, float] = field(default_factory=dict[Slot, float])
    """Slot -> entropy of the first segment ever seen there."""

    async def __call__(self, builder: EpisodeBuilder) -> None:
        roots = self.how.initial_rollouts
        if self.how.dynamic:
            roots = await self._try_out(builder)
        live = [await builder.root() for _ in range(min(roots, self.how.samples))]
        in_a_row = 0
        while live:
            await asyncio.gather(*(one.turn() for one in live if one.is_live))
            changes = {
                one: self._change(one, builder) for one in live if one.last_sampled is not None
            }
            began = len(builder.trajectories)
            live = [one for one in live if one.is_live]
            for trajectory in [one for one in live if one.can_sample]:
                live += await self._fork_from(trajectory, changes[trajectory], builder, in_a_row)
            if not live and len(builder.trajectories) < self.how.samples:
                live.append(await builder.root())
            in_a_row = in_a_row + 1 if len(builder.trajectories) > began else 0

    def _change(self, trajectory: LiveTrajectory, builder: EpisodeBuilder) -> float:
        """Entropy of the latest segment minus that of the first one in this slot."""
        assert trajectory.last_sampled is not None
        entropy = self._entropy(first_decisions(trajectory.partial.spans, self.how.tokens), builder)
        slot = builder.index, trajectory.number
        return entropy - self.first_entropies.setdefault(slot, entropy)

    async def _fork_from(
        self, trajectory: LiveTrajectory, change: float, builder: EpisodeBuilder, in_a_row: int
    ) -> list[LiveTrajectory]:
        """Forks of a trajectory that has just had its turn."""
        assert trajectory.last_sampled is not None
        turn = int(trajectory.metrics["turns"])
        draws = random.Random(builder.key(trajectory.number, f"/fork/{turn}"))
        most = min(self.how.beam_size - 1, self.how.samples - len(builder.trajectories))
        wanted = sum(self._is_due(draws.random(), change, in_a_row) for _ in range(most))
        forks: list[LiveTrajectory] = []
        for _ in range(wanted):
            try:
                forks.append(await builder.fork(trajectory))
            except RolloutFailure as failure:
                builder.episode.spans[trajectory.tip].info["error"] = str(failure)
        trajectory.last_sampled.info.update(entropy_change=change, forks=len(forks))
        return forks

    def _is_due(self, uniform: float, change: float, in_a_row: int) -> bool:
        """Whether one draw makes a fork."""
        if not self.is_aepo:
            drawn = min(max(uniform - self.how.entropy_weight * change, 0.0), 1.0)
            return drawn <= self.how.branch_probability
        scale = max(0.0, 1.0 - self.how.penalty * in_a_row)
        drawn = min(max((uniform + self.how.entropy_weight * change) * scale, 0.0), 1.0)
        return drawn >= self.how.branch_probability

    def _entropy(self, entropies: Sequence[float], builder: EpisodeBuilder) -> float:
        return sum(entropies) / math.log(max(builder.setup.engine.vocab_size, 2))

    async def _try_out(self, builder: EpisodeBuilder) -> int:
        """AEPO's number of roots, from an attempt that is neither trained nor counted."""
        trajectory = await builder.root("/thrown away")
        await trajectory.finish()
        builder.trajectories.remove(trajectory)
        sampled = [span for span in trajectory.spans if span.author is Author.POLICY]
        segments = [
            self._entropy(first_decisions([span], self.how.tokens), builder) for span in sampled
        ]
        gap = segments[0] - sum(segments) / len(segments) if segments else 0.0
        return min(
            int(self.how.samples * sigmoid(self.how.sensitivity * gap)) + 1, self.how.samples
        )

    def begin(self, step: int) -> None:
        """Slots are the same in every step, and their entropies are kept."""

    def settle(self, episodes: Sequence[Episode]) -> None:
        """Nothing to learn from rewards."""

    @property
    def state(self) -> dict[str, Any]:
        return {"first_entropies": [[*slot, h] for slot, h in self.first_entropies.items()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.first_entropies = {
            (int(place), int(number)): float(h) for place, number, h in state["first_entropies"]
        }
