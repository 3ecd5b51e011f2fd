"""ARPO's and AEPO's branch: attempts fork where an observation leaves the policy unsure.

    samples 4, initial_rollouts 2

    prompt ── "I search" ── result ┬─ "Hm, then"  ... answer      root 0; unsure here, so it forks:
           │                       └─ "So it is"  ... answer      the same tools were called, once
           └─ "2 + 3"    ── result ── "That is 5" ... answer      root 1; sure, no fork
           └─ ...                                                 the budget is not used up: root 2

After each observation the first `tokens` of the next turn are sampled and their entropy is held
against that of the attempt's first tokens (`uncertainty`). A fork continues right behind the observation,
so that the two differ in the uncertain tokens; the source keeps those it has sampled.

There are always exactly `samples` leaves: attempts that forks leave over begin at the prompt, all at once,
when no attempt that could fork is left.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from graft.rollout.branches.arpo_faithful import FaithfulBranching
from graft.rollout.branches.branch import Branch
from graft.rollout.branches.program_forks import ProgramTree
from graft.rollout.branches.uncertainty import (
    ForkRule,
    first_decisions,
    mean_entropy,
    probability,
    root_budget,
    turn_entropies,
)
from graft.rollout.episode_builder import EpisodeBuilder
from graft.rollout.failure import RolloutFailure
from graft.rollout.live_trajectory import LiveTrajectory


@dataclass(frozen=True, slots=True)
class Branching:
    """The branch of a rule."""

    rule: ForkRule
    runs_programs: ClassVar[bool] = True

    async def __call__(self, builder: EpisodeBuilder) -> None:
        tree = _Tree if builder.programs is None else ProgramTree
        await tree(self.rule, builder).grow()


@dataclass(slots=True)
class _ForkState:
    """What a trajectory carries along and its forks inherit: baseline entropy, forks in a row."""

    baseline: float
    in_a_row: int = 0


class _Tree:
    """One task's attempts while they fork."""

    def __init__(self, how: ForkRule, builder: EpisodeBuilder) -> None:
        self.how, self.builder = how, builder
        self.vocab_size = builder.setup.engine.vocab_size
        self.states: dict[LiveTrajectory, _ForkState] = {}
        self.in_a_row = 0
        self.forking = 0
        """Forks that are being made: copying an environment may take a while."""

    @property
    def num_remaining(self) -> int:
        """Attempts that may still begin."""
        return self.how.samples - len(self.builder.trajectories) - self.forking

    async def grow(self) -> None:
        roots = self.how.initial_rollouts
        if self.how.dynamic:
            roots = await self._try_out()
        live = await self._begin(roots - len(self.builder.trajectories))
        if self.how.order == "arrival":
            await asyncio.gather(*(self._grow_apart(one) for one in live))
        else:
            await self._grow_in_rounds(live)
        rest = await self._begin(self.num_remaining)
        await asyncio.gather(*(one.finish() for one in rest))

    async def _begin(self, count: int) -> list[LiveTrajectory]:
        begun = [await self.builder.root() for _ in range(count)]
        return [one for one in begun if one.is_live]

    async def _try_out(self) -> int:
        """Complete one attempt; the number that begin at the prompt, this one included."""
        trajectory = await self.builder.root()
        await trajectory.finish()
        first, *later = turn_entropies(trajectory.spans, self.how.tokens, self.vocab_size) or [0.0]
        after_results = sum(later) / len(later) if later else 0.0
        return root_budget(self.how.samples, self.how.sensitivity, first, after_results)

    async def _grow_in_rounds(self, live: list[LiveTrajectory]) -> None:
        """A turn of all, then forks; when the budget is used up, attempts no longer wait for each other."""
        while live and self.num_remaining:
            await asyncio.gather(*(self._advance(one) for one in live))
            live = [one for one in live if one.is_live]
            live += await self._fork_from(live)
        await asyncio.gather(*(one.finish() for one in live))

    async def _grow_apart(self, trajectory: LiveTrajectory) -> None:
        """Complete the trajectory and its forks."""
        apart: list[asyncio.Future[None]] = []
        while trajectory.is_live and self.num_remaining:
            await self._advance(trajectory)
            forks = await self._fork_from([trajectory] if trajectory.is_live else [])
            apart += [asyncio.ensure_future(self._grow_apart(fork)) for fork in forks]
        await asyncio.gather(trajectory.finish(), *apart)

    async def _advance(self, trajectory: LiveTrajectory) -> None:
        """Continue to the first tokens after the next observation, or to the end."""
        is_first = trajectory not in self.states
        await trajectory.turn()
        if is_first and trajectory.last_sampled is not None:
            self.states[trajectory] = _ForkState(self._entropy_of(trajectory))
        if trajectory.is_live:
            await trajectory.begin(self.how.tokens)

    def _entropy_of(self, trajectory: LiveTrajectory) -> float:
        """The entropy of the turn in progress, or the last one."""
        first = first_decisions(trajectory.partial.spans, self.how.tokens)
        return mean_entropy(first, self.vocab_size)

    async def _fork_from(self, trajectories: Sequence[LiveTrajectory]) -> list[LiveTrajectory]:
        """Forks of those that are unsure, within the budget."""
        changes = {
            one: self._entropy_of(one) - self.states[one].baseline
            for one in trajectories
            if one.partial.is_open
        }
        order = list(changes)
        if self.how.order == "entropy":
            order.sort(key=lambda one: -changes[one])
        forks: list[LiveTrajectory] = []
        for trajectory in order:
            made = await self._fork(trajectory, self._wanted(trajectory, changes[trajectory]))
            own = self.states[trajectory]
            own.in_a_row = own.in_a_row + 1 if made else 0
            self.states |= {fork: replace(own) for fork in made}
            begun = trajectory.partial.spans[-1]
            begun.info.update(entropy_change=changes[trajectory], forks=len(made))
            forks += made
        self.in_a_row = self.in_a_row + 1 if forks else 0
        return forks

    async def _fork(self, trajectory: LiveTrajectory, count: int) -> list[LiveTrajectory]:
        """`count` forks, or fewer where the environment cannot be copied."""
        made: list[LiveTrajectory] = []
        self.forking += count
        for _ in range(count):
            try:
                made.append(await self.builder.fork(trajectory))
            except RolloutFailure as failure:
                self.builder.episode.spans[trajectory.tip].info["error"] = str(failure)
            finally:
                self.forking -= 1  # it is among the trajectories now, or failed
        return made

    def _wanted(self, trajectory: LiveTrajectory, change: float) -> int:
        """How many forks this trajectory should get."""
        how = self.how
        most = min(how.beam_size - 1, self.num_remaining)
        in_a_row = self.states[trajectory].in_a_row if how.penalty_over == "path" else self.in_a_row
        chance = probability(
            how.branch_probability, how.entropy_weight, change, how.penalty, in_a_row
        )
        if how.rule == "threshold":
            return most if chance > how.threshold else 0
        turn = int(trajectory.metrics["turns"])
        draws = random.Random(self.builder.key(trajectory.number, f"/fork/{turn}"))
        return sum(draws.random() < chance for _ in range(most))


def arpo(
    samples: int,
    initial_rollouts: int | None = None,
    beam_size: int = 2,
    branch_probability: float = 0.5,
    entropy_weight: float = 0.2,
    tokens: int = 20,
    rule: str = "stochastic",
    threshold: float = 0.5,
    order: str = "entropy",
    faithful: bool = False,
) -> Branch:
    """Half of the attempts begin at the prompt, the others where one of those is unsure.

    `faithful` is the published program instead, faults included (see `arpo_faithful`), without `rule`,
    `threshold` and `order`.
    """
    return _make(is_aepo=False, **locals())


def aepo(
    samples: int,
    initial_rollouts: int | None = None,
    beam_size: int = 2,
    branch_probability: float = 0.5,
    entropy_weight: float = 0.2,
    tokens: int = 20,
    rule: str = "stochastic",
    threshold: float = 0.5,
    order: str = "entropy",
    dynamic: bool = True,
    sensitivity: float = 0.5,
    penalty: float = 0.05,
    penalty_over: str = "path",
    faithful: bool = False,
) -> Branch:
    """`arpo` with a number of roots that the first attempt decides (`dynamic`), and a penalty on forks in
    a row."""
    return _make(is_aepo=True, **locals())


def _make(
    is_aepo: bool, faithful: bool, samples: int, initial_rollouts: int | None, **how: Any
) -> Branch:
    if not isinstance(faithful, bool):
        raise ValueError(f"faithful={faithful!r}: must be true or false")
    roots = max(samples // 2, 1) if initial_rollouts is None else initial_rollouts
    rule = ForkRule(samples=samples, initial_rollouts=roots, **how)
    return FaithfulBranching(rule, is_aepo) if faithful else Branching(rule)
