"""CPO's branch: where a whole group failed, what would a call have brought?

    y   "2+3=" -> "I think it is 6"                       reward 0, and so had every other attempt
    y'  "2+3=" -> "I think" + " calculate " forced -> "2 + 3 = " -> "5" -> ...    reward 1

    A(y') = R(y') - R(y) = 1 on all of y', the forced decision included; y itself is replaced

The place is drawn near where the policy might have called by itself (`positions`), the tool is one
for the whole step, drawn by what it has brought so far (`gains`), and y' goes on from the shared
beginning like any other path (`twin`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from graft.actions.actions import Actions
from graft.rollout.branches import positions
from graft.rollout.branches import tool_gains as gains
from graft.rollout.branches.twin import branch_off, force
from graft.rollout.episode_builder import EpisodeBuilder, draw_key
from graft.rollout.failure import RolloutFailure, boundary
from graft.rollout.live_trajectory import LiveTrajectory
from graft.types import NO_ACTION, Episode, Status

GATES = ("zero_groups", "all")


class Counterfactual:
    """`samples` independent attempts, then a counterfactual one for each that the gate lets through.

    `gate` "zero_groups" rewrites the attempts of a group in which nobody earned anything, "all"
    those of every group. `replace` leaves the rewritten attempt out of training; None does so where
    that loses nothing: in a group of zeros, whose own advantages are 0. An attempt that failed for
    a reason not its own is never rewritten, nor replaced by a twin that did.

    `tools` are those that may be forced, none: all of the run's actions. `temperature`, `top_k` and
    `top_p` are of the places (see `positions`).
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
                f"replace={replace!r}: must be true, false, or null for the gate's own"
            )
        if not isinstance(top_k, int):
            raise ValueError(f"top_k={top_k!r}: must be a whole number, without quotation marks")
        if not all(isinstance(share, (int, float)) for share in (temperature, top_p)):
            raise ValueError(f"temperature={temperature!r}, top_p={top_p!r}: must be numbers")
        if temperature <= 0 or top_k < 1 or not 0 < top_p <= 1:
            raise ValueError(
                f"temperature={temperature}, top_k={top_k}, top_p={top_p}: places are drawn with a "
                "temperature above 0 from at least 1 of them, and top_p lies in (0, 1]"
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
        paths = [await builder.root() for _ in range(self.samples)]
        await asyncio.gather(*(path.finish() for path in paths))
        twins = await self._rewrite(self._let_through(paths), actions, tool)
        for path in paths:
            path.close()  # twins have their own hold on what they share
        await asyncio.gather(*(twin.finish() for twin in twins))
        for twin in twins:
            if self.replace and _is_trainable(twin):
                assert twin.twin_of is not None and twin.twin_of.leaf is not None
                twin.twin_of.leaf.status = Status.REPLACED

    def begin(self, step: int) -> None:
        """A tool is drawn anew for each step, the same one if the step is taken again."""
        self._step, self._tool = step, None

    def tool_of_step(self, actions: Actions) -> str:
        """The tool that is forced in this step."""
        if self._tool is None:
            self.check_tools(actions)
            tools = self.tools or actions.tools
            odds = gains.chances({tool: self.averages.get(tool, gains.START) for tool in tools})
            uniform = random.Random(draw_key(self.seed, "tool", self._step)).random()
            self._tool = list(odds)[positions.draw(list(odds.values()), uniform)]
        return self._tool

    def check_tools(self, actions: Actions) -> None:
        """Raise if a tool is to be forced that these actions do not have."""
        unknown = [tool for tool in self.tools if tool not in actions.tools]
        if unknown:
            raise ValueError(
                f"the branch 'counterfactual' cannot force {', '.join(unknown)}; the actions "
                f"have {', '.join(actions.tools)}"
            )

    def settle(self, episodes: Sequence[Episode]) -> None:
        """Remember what the tool of this step has brought."""
        brought = [
            leaf.reward - episode.leaves[leaf.twin].reward
            for episode in episodes
            for leaf in episode.leaves
            if leaf.twin is not None and leaf.status.is_trainable
        ]
        if self._tool is not None:
            average = self.averages.get(self._tool, gains.START)
            self.averages[self._tool] = gains.update(average, brought)

    @property
    def state(self) -> dict[str, Any]:
        return {"averages": dict(self.averages)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.averages = dict(state["averages"])

    def _let_through(self, paths: Sequence[LiveTrajectory]) -> list[LiveTrajectory]:
        """The attempts to rewrite; the group is judged by those that ended for their own reasons."""
        ended = [path for path in paths if _is_trainable(path)]
        is_zero = all(path.leaf is not None and path.leaf.reward == 0 for path in ended)
        return ended if self.gate == "all" or is_zero else []

    async def _rewrite(
        self, paths: list[LiveTrajectory], actions: Actions, tool: str
    ) -> list[LiveTrajectory]:
        """Twins of these paths, their calls begun, less those that engine or environment refused."""
        twins: list[LiveTrajectory] = []
        if not paths:
            return twins
        try:
            places = await self._places(paths, actions, tool)
        except (
            RolloutFailure
        ) as failure:  # costs the twins, and not what they would have been twins of
            _note(paths[0], failure)
            return twins
        # one after the other: the number of a path names its draws
        for path, (at, logprobs) in zip(paths, places, strict=True):
            try:
                twin = await branch_off(path, at)
            except RolloutFailure as failure:
                _note(path, failure)
                continue
            force(twin, actions.entry(tool), logprobs, tool)
            twins.append(twin)
        return twins

    async def _places(
        self, paths: list[LiveTrajectory], actions: Actions, tool: str
    ) -> list[tuple[int, list[float]]]:
        """Before which token of each path to insert the entry of `tool`, and its log-probs there."""
        builder, space, language = paths[0].builder, actions.space, actions.grammar.start
        entry = [action for action in actions.entry(tool).actions if action != NO_ACTION]
        is_routed = entry[0] >= space.vocab_size
        ways = [actions.words(tool), *([entry] if is_routed else [])]
        texts: list[list[int]] = []
        free: list[list[int]] = []
        for path in paths:
            spans = [builder.episode.spans[i] for i in builder.episode.walk(path.tip)]
            texts.append([token for span in spans for token in span.tokens])
            places = positions.insertable(spans, language, space.vocab_size)
            free.append(places or [len(spans[0])])  # or right after the prompt
        score, temperature = builder.setup.engine.score, builder.setup.sampling.temperature
        async with boundary(f"scores of {builder.episode.task.id}", builder.setup.deadline):
            found = score(texts, free, ways, language)
            chosen = [
                self._draw(scores, builder.key(path.number, "/place"))
                for path, scores in zip(paths, found, strict=True)
            ]
            at = [places[i] for places, i in zip(free, chosen, strict=True)]
            if is_routed and temperature == 1:
                thought = [scores[i][1] for scores, i in zip(found, chosen, strict=True)]
            else:
                alone = score(texts, [[place] for place in at], [entry], language, temperature)
                thought = [scores[0][0] for scores in alone]
        return list(zip(at, thought, strict=True))

    def _draw(self, found: Sequence[Sequence[Sequence[float]]], key: int) -> int:
        """The number of the place, of those whose log-probs these are."""
        scores = [positions.score(logprobs, self.temperature) for logprobs in found]
        odds = positions.weights(scores, self.top_k, self.top_p)
        return positions.draw(odds, random.Random(key).random())


def _note(path: LiveTrajectory, failure: RolloutFailure) -> None:
    path.builder.episode.spans[path.tip].info["error"] = str(failure)


def _is_trainable(path: LiveTrajectory) -> bool:
    return path.leaf is not None and path.leaf.status.is_trainable
