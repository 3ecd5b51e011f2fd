"""One game with several seats: each seat has a context, a trajectory and a reward of its own.

    X   task "You are X ..."            policy 5    env "O took 1. ..."    policy 9 ...    leaf, reward 1
    O   task "You are O ... X took 5."  policy 1    env "X took 9. ..."    ...             leaf, reward -1

A seat's prompt is everything it was shown before its first action, and attempts with the same prompt
share its root. A seat whose turn is cut off by a limit loses by the rules of the game. A seat that
never acted has a leaf without a turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from graft.envs.base import BaseEnv
from graft.envs.multi_agent.base import MultiAgentEnv, joined
from graft.envs.multi_agent.seat import SeatEnv
from graft.protocols import Env
from graft.rollout.episode_draft import EpisodeDraft
from graft.rollout.failure import RolloutFailure, boundary, concurrently
from graft.rollout.live_trajectory import LiveTrajectory
from graft.rollout.user_calls import call, try_close
from graft.types import Finish, Status, Turn
from graft.user_code import UserCodeError


class WatchedGame(BaseEnv):
    """Stands for the game in a seat's trajectory: the match acts on the game itself."""

    env_id = "seat"

    def __init__(self, game: MultiAgentEnv) -> None:
        super().__init__()
        self.stop, self.observe_as = game.stop, game.observe_as
        self.game = game

    def state_key(self) -> str:
        return self.game.state_key()


class Seat:
    """One agent of a match, and its trajectory from its first action on."""

    def __init__(self, name: str, draft: EpisodeDraft, match: Match, prompt: str) -> None:
        self.name, self.draft, self.match, self.prompt = name, draft, match, prompt
        self.live: LiveTrajectory | None = None
        self.action = ""
        self.early = 0.0  # earned before its first action

    @property
    def is_trained(self) -> bool:
        return self.draft is self.match.draft

    def opened(self) -> LiveTrajectory:
        """Its trajectory, begun with the prompt so far."""
        if self.live is None:
            draft, match, agents = self.draft, self.match, self.match.game.agents
            number = match.number * len(agents) + agents.index(self.name)
            tip, context, transcript = draft.open_prompt(self.prompt)
            fork = context.fork(draft.key(number, "" if self.is_trained else "/frozen"))
            self.live = LiveTrajectory(draft, number, fork, WatchedGame(match.game), tip)
            self.live.transcripts = [] if transcript is None else [transcript]
            self.live.seat, self.live.match = self.name, match.number
            if self.is_trained:
                match.trajectories.append(self.live)
        return self.live

    async def decide(self) -> str | None:
        """Its next action; None where a limit of the rollout cuts it off."""
        live = self.opened()
        if not (live.has_turns and live.can_sample):
            return None
        action = await live.decide()
        if live.partial.finish is Finish.ABORT:
            raise RolloutFailure(Status.ABORTED, f"the completion of seat {self.name} was given up")
        self.action = action or ""
        return action

    async def receive(self, turn: Turn, is_cut: bool) -> None:
        turn, self.early = turn._replace(reward=turn.reward + self.early), 0.0
        if turn.is_over:
            turn.info["rewards"] = dict(self.match.game.earned)
        if self.live is None and not turn.is_over:
            self.prompt, self.early = joined(self.prompt, turn.observation), turn.reward
            return
        live = self.opened()
        if is_cut or not live.metrics["turns"]:
            await live.record(self.action, turn)
            await live.end(Status.TRUNCATED if is_cut else Status.DONE)
        else:
            await live.receive(self.action, turn)


class Match:
    """An attempt at a task with several seats."""

    def __init__(
        self,
        draft: EpisodeDraft,
        frozen: Mapping[str, EpisodeDraft],
        number: int,
        env: Env,
        trajectories: list[LiveTrajectory],
    ) -> None:
        """
        frozen: the drafts of seats that another model plays, which are not recorded.
        trajectories: those of the episode, to which each seat that the policy plays adds its own.
        """
        self.draft, self.frozen, self.number, self.env = draft, frozen, number, env
        self.trajectories = trajectories
        self.game = game_of(env)
        self.seats: dict[str, Seat] = {}

    async def finish(self) -> None:
        """Play to the end. A failure in any seat ends the match for all of them."""
        try:
            await self._reset()
            while self.game.active:
                await self._round()
        except RolloutFailure as failure:
            await self._fail(failure)
        finally:
            for seat in self.seats.values():
                if seat.live is not None and seat.live.is_live:
                    seat.live.close()
            try_close(self.env)

    async def _reset(self) -> None:
        task, setup, game = self.draft.episode.task, self.draft.setup, self.game
        async with boundary(f"env {task.env} reset", setup.deadline):
            seen: dict[str, str] = await call(self.env, game.reset, task.seed)
        open_seats = [agent for agent in game.agents if agent not in game.players]
        check_frozen(self.frozen, open_seats)
        self.seats = {
            agent: Seat(agent, self.frozen.get(agent, self.draft), self, seen[agent])
            for agent in open_seats
        }

    async def _round(self) -> None:
        """One action of every active seat, and what each seat learns from them."""
        task, setup, game = self.draft.episode.task, self.draft.setup, self.game
        seats = [self.seats[agent] for agent in game.active if agent in self.seats]
        decided = await concurrently(Seat.decide, seats)
        actions = {seat.name: action for seat, action in zip(seats, decided, strict=True)}
        silent = [agent for agent, action in actions.items() if action is None]
        async with boundary(f"env {task.env} step", setup.deadline):
            step: Any = (game.forfeit, silent) if silent else (game.step, actions)
            turns: dict[str, Turn] = await call(self.env, *step)
        for agent, turn in turns.items():
            await self.seats[agent].receive(turn, is_cut=agent in silent)

    async def _fail(self, failure: RolloutFailure) -> None:
        trained = [seat for seat in self.seats.values() if seat.is_trained]
        if not trained:  # the game could not be reset
            raise failure
        self.draft.on_failure(failure)
        begun = [seat for seat in trained if seat.live is not None] or trained[:1]
        lives = [one for seat in begun if (one := seat.opened()).is_live]
        for number, one in enumerate(lives):
            if not number:
                failure.write(self.draft.episode.spans[one.tip].info)
            await one.end(failure.status)


def game_of(env: Env) -> MultiAgentEnv:
    game = match_of(env)
    assert game is not None, "a match is played in an environment with several seats"
    return game


def match_of(env: Any) -> MultiAgentEnv | None:
    """The game of an environment whose seats are all played by policies; None elsewhere."""
    inner = getattr(env, "unwrapped", env)
    game = inner.match() if isinstance(inner, SeatEnv) else None
    if game is not None and inner is not env:
        raise UserCodeError(
            f"env {inner.env_id!r} is played by all its seats, and wrappers see only one of them; leave "
            "task.wrappers out, or set self_play=False in task.args to play one seat against a program"
        )
    return game


def frozen_drafts(draft: EpisodeDraft) -> dict[str, EpisodeDraft]:
    """A draft for each seat that a frozen model plays; its spans are not part of the episode."""
    setup = draft.setup
    return {
        seat: EpisodeDraft(draft.episode.task, replace(setup, engine=engine, reward=None))
        for seat, engine in setup.frozen.items()
    }


def check_frozen(frozen: Mapping[str, Any], open_seats: Sequence[str]) -> None:
    strange = [seat for seat in frozen if seat not in open_seats]
    if strange or (frozen and len(frozen) == len(open_seats)):
        raise UserCodeError(
            f"rollout.frozen names the seats {', '.join(frozen)}; it must name some of "
            f"{', '.join(open_seats)}, and leave one for the policy"
        )
