"""CPO's branch: where a whole group failed, attempts with a forced call.

    y   "2+3=" -> "I think it is 6"                       reward 0, and so had every other attempt
    y'  "2+3=" -> "I think" + " calculate " forced -> "2 + 3 = " -> "5" -> ...    reward 1

    A(y') = R(y') - R(y) = 1 on all of y', the forced decision included; y itself is replaced

The position is drawn near where the policy was likely to call (`positions`), the tool is one for the
whole step, and y' continues from the shared beginning like any other trajectory (`twin`). The tool is
drawn by its past gains, a moving average per tool of R(y') - R(y):

    compare  0.001 -> 0.9 * 0.001 + 0.1 * 0.5 = 0.0509     half of the rewritten attempts succeeded
    swap     0.001
    chances  exp(0.0509 / 0.0509) : exp(0.001 / 0.0509) = 2.718 : 1.020 = 0.727 : 0.273
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from graft.actions.actions import Actions
from graft.rollout.branches import positions
from graft.rollout.branches.twin import branch_off, force
from graft.rollout.episode_builder import EpisodeBuilder
from graft.rollout.failure import RolloutFailure, boundary
from graft.rollout.live_trajectory import LiveTrajectory
from graft.rollout.setup import draw_key
from graft.types import NO_ACTION, Episode, Status

GATES = ("zero_groups", "all")
FIRST_GAIN = 0.001
"""The average gain of a tool that was never forced."""
KEPT = 0.9
"""Of the old average, at each update."""
NO_GAIN = 1e-5
"""Where the averages sum to less, every tool has the same probability."""


class Counterfactual:
    """`samples` independent attempts, then a counterfactual one for each that the gate lets through.

    `gate` "zero_groups" rewrites the attempts of a group in which all rewards are 0, "all" those of
    every group. `replace` leaves the rewritten attempt out of training; None does so where that loses
    nothing: in a group of zeros, whose own advantages are 0. An attempt that an engine, tool or
    environment broke is never rewritten, and such a twin replaces no attempt.

    `tools` may be forced; empty: all of the run's actions. `temperature`, `top_k` and `top_p` are those
    of the draw of positions (see `positions`).
    """

    def __init__(
        self,
        samples: int,
        tools: Sequence[str] = (),
        gate: str = "zero_groups",
        replace: bool | None = None,
        temperature: float = 10.0,
        top_k: int = 10,
        top_p: float = 0.9,
        seed: int = 0,
    ) -> None:
        if gate not in GATES:
            raise ValueError(f"gate={gate!r}: must be one of {', '.join(GATES)}")
        if isinstance(tools, str) or not all(isinstance(tool, str) for tool in tools):
            raise ValueError(f"tools={tools!r}: must be a list of names, as in [compare, swap]")
        if not (replace is None or isinstance(replace, bool)):
            raise ValueError(
                f"replace={replace!r}: must be true, false, or null for the default of the gate"
            )
        if not isinstance(top_k, int):
            raise ValueError(f"top_k={top_k!r}: must be a whole number, without quotation marks")
        if not all(isinstance(share, (int, float)) for share in (temperature, top_p)):
            raise ValueError(f"temperature={temperature!r}, top_p={top_p!r}: must be numbers")
        if temperature <= 0 or top_k < 1 or not 0 < top_p <= 1:
            raise ValueError(
                f"temperature={temperature}, top_k={top_k}, top_p={top_p}: must be above 0, at "
                "least 1, and in (0, 1]"
            )
        self.samples, self.tools, self.gate = samples, tuple(tools), gate
        self.replace = gate == "zero_groups" if replace is None else replace
        self.temperature, self.top_k, self.top_p, self.seed = temperature, top_k, top_p, seed
        self.averages: dict[str, float] = {}
        self._step = 0
        self._tool: str | None = None

    async def __call__(self, builder: EpisodeBuilder) -> None:
        actions = builder.setup.actions
        if actions is None:
            raise ValueError(
                "the branch 'counterfactual' forces calls, and this run has no actions to force; "
                "set actions.file, or take rollout.branch=independent"
            )
        tool = self.tool_of_step(actions)
        builder.keep_open = True
        trajectories = [await builder.root() for _ in range(self.samples)]
        await asyncio.gather(*(one.finish() for one in trajectories))
        twins = await self._rewrite(builder, self._gated(trajectories), actions, tool)
        for trajectory in trajectories:
            trajectory.close()  # twins hold the shared pages themselves
        await asyncio.gather(*(twin.finish() for twin in twins))
        for twin in twins:
            if self.replace and _is_trainable(twin):
                assert twin.twin_of is not None and twin.twin_of.leaf is not None
                twin.twin_of.leaf.status = Status.REPLACED

    def begin(self, step: int) -> None:
        """Each step draws a tool; a step that is repeated draws the same one."""
        self._step, self._tool = step, None

    def tool_of_step(self, actions: Actions) -> str:
        """The tool to force in this step."""
        if self._tool is None:
            self.check_tools(actions)
            tools = self.tools or actions.tools
            odds = chances({tool: self.averages.get(tool, FIRST_GAIN) for tool in tools})
            uniform = random.Random(draw_key(self.seed, "tool", self._step)).random()
            self._tool = list(odds)[positions.draw(list(odds.values()), uniform)]
        return self._tool

    def check_tools(self, actions: Actions) -> None:
        """Raise if these actions lack a tool that should be forced."""
        unknown = [tool for tool in self.tools if tool not in actions.tools]
        if unknown:
            raise ValueError(
                f"the branch 'counterfactual' cannot force {', '.join(unknown)}; the actions "
                f"have {', '.join(actions.tools)}"
            )

    def settle(self, episodes: Sequence[Episode]) -> None:
        """Update the average gain of this step's tool."""
        found = [
            leaf.reward - episode.leaves[leaf.twin].reward
            for episode in episodes
            for leaf in episode.leaves
            if leaf.twin is not None and leaf.status.is_trainable
        ]
        if self._tool is not None:
            average = self.averages.get(self._tool, FIRST_GAIN)
            self.averages[self._tool] = update(average, found)

    @property
    def state(self) -> dict[str, Any]:
        return {"averages": dict(self.averages)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.averages = dict(state["averages"])

    def _gated(self, trajectories: Sequence[LiveTrajectory]) -> list[LiveTrajectory]:
        """The attempts to rewrite; those that were broken by others do not count in their group."""
        ended = [one for one in trajectories if _is_trainable(one)]
        is_zero = all(one.leaf is not None and one.leaf.reward == 0 for one in ended)
        return ended if self.gate == "all" or is_zero else []

    async def _rewrite(
        self,
        builder: EpisodeBuilder,
        trajectories: list[LiveTrajectory],
        actions: Actions,
        tool: str,
    ) -> list[LiveTrajectory]:
        """Twins with the call forced, without those that the engine or environment failed to make."""
        twins: list[LiveTrajectory] = []
        if not trajectories:
            return twins
        try:
            found = await self._positions(builder, trajectories, actions, tool)
        except RolloutFailure as failure:  # costs the twins, not the attempts
            _note(trajectories[0], failure)
            return twins
        # one after the other: the number of a trajectory seeds its draws
        for trajectory, (at, logprobs) in zip(trajectories, found, strict=True):
            try:
                twin = await branch_off(builder, trajectory, at)
            except RolloutFailure as failure:
                _note(trajectory, failure)
                continue
            force(twin, actions.entry(tool), logprobs, tool)
            twins.append(twin)
        return twins

    async def _positions(
        self,
        builder: EpisodeBuilder,
        trajectories: list[LiveTrajectory],
        actions: Actions,
        tool: str,
    ) -> list[tuple[int, list[float]]]:
        """Find the position of each trajectory to insert the entry of `tool` at, and its log-probs there."""
        space, language = actions.space, actions.grammar.start
        entry = [action for action in actions.entry(tool).actions if action != NO_ACTION]
        is_routed = entry[0] >= space.vocab_size
        ways = [actions.words(tool), *([entry] if is_routed else [])]
        texts: list[list[int]] = []
        free: list[list[int]] = []
        for trajectory in trajectories:
            spans = [builder.episode.spans[i] for i in builder.episode.walk(trajectory.tip)]
            texts.append([token for span in spans for token in span.tokens])
            insertable = positions.insertable(spans, language, space.vocab_size)
            free.append(insertable or [len(spans[0])])  # or right after the prompt
        score, temperature = builder.setup.engine.score, builder.setup.sampling.temperature
        async with boundary(f"scores of {builder.episode.task.id}", builder.setup.deadline):
            found = score(texts, free, ways, language)
            chosen = [
                self._draw(scores, builder.key(trajectory.number, "/place"))
                for trajectory, scores in zip(trajectories, found, strict=True)
            ]
            at = [some[i] for some, i in zip(free, chosen, strict=True)]
            if is_routed and temperature == 1:
                logprobs = [scores[i][1] for scores, i in zip(found, chosen, strict=True)]
            else:
                alone = score(
                    texts, [[position] for position in at], [entry], language, temperature
                )
                logprobs = [scores[0][0] for scores in alone]
        return list(zip(at, logprobs, strict=True))

    def _draw(self, found: Sequence[Sequence[Sequence[float]]], key: int) -> int:
        """The index of the position to take, given the log-probs at each."""
        scores = [positions.score(logprobs, self.temperature) for logprobs in found]
        odds = positions.weights(scores, self.top_k, self.top_p)
        return positions.draw(odds, random.Random(key).random())


def _note(trajectory: LiveTrajectory, failure: RolloutFailure) -> None:
    trajectory.draft.episode.spans[trajectory.tip].info["error"] = str(failure)


def _is_trainable(trajectory: LiveTrajectory) -> bool:
    return trajectory.leaf is not None and trajectory.leaf.status.is_trainable


def update(average: float, gains: Sequence[float]) -> float:
    """The average after a step; unchanged without gains, or where one is not finite."""
    if not gains:
        return average
    mean = math.fsum(gains) / len(gains)
    return KEPT * average + (1 - KEPT) * mean if math.isfinite(mean) else average


def chances(averages: Mapping[str, float]) -> dict[str, float]:
    """Probability of each tool, proportional to exp(max(0, average) / largest average)."""
    positive = {tool: max(0.0, average) for tool, average in averages.items()}
    largest = max(positive.values())
    if sum(positive.values()) < NO_GAIN:
        return dict.fromkeys(averages, 1 / len(averages))
    mass = {tool: math.exp(value / largest) for tool, value in positive.items()}
    total = math.fsum(mass.values())
    return {tool: part / total for tool, part in mass.items()}
