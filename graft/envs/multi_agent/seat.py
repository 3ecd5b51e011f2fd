"""One seat of a game as an environment; programs play the other seats.

    env = graft.make("selfplay:tictactoe", opponent="minimax", seat="O")
    env.reset(seed=7)       "You are O. ... X took 5."
    env.step("\\boxed{1}")  Turn("X took 9. ...")

In a rollout with `self_play` (the default) a policy plays every seat instead, each with a context and
a reward of its own: `match` is the game that `graft.rollout.match` then plays.
"""

from __future__ import annotations

import random
from typing import Any

from graft.envs.base import BaseEnv, Trace
from graft.envs.multi_agent.base import MultiAgentEnv
from graft.types import Author, Turn


class SeatEnv(BaseEnv):
    """A seat of `game`, whose settings decide which, and who plays the others."""

    max_turns = None
    saved = (*BaseEnv.saved, "seat")

    def __init__(self, game: MultiAgentEnv) -> None:
        super().__init__()
        self.game = game
        self.seat = ""
        self.stop, self.observe_as = game.stop, game.observe_as
        self.blocking, self.forkable = game.blocking, game.forkable

    @property
    def alphabet(self) -> str:
        """Every character of the game; "" where it is not known."""
        return getattr(self.game, "alphabet", "")

    def match(self) -> MultiAgentEnv | None:
        """The game with all seats, except those of its `players`, open; None: one seat is played."""
        if not self.game.self_play:
            return None
        self.game.players = dict(self.game.fixed)
        self.game.task_salt = self.task_salt
        return self.game

    def pose(self) -> str:
        game = self.game
        free = [agent for agent in game.agents if agent not in game.fixed]
        self.seat = game.seat or self.rng.choice(free)
        others = {agent: game.opponent for agent in game.agents if agent != self.seat}
        game.players = {**others, **game.fixed}
        game.task_salt = self.task_salt
        return game.reset(self.seed)[self.seat]

    def respond(self, action: str) -> Turn:
        turn = self.game.step({self.seat: action})[self.seat]
        return turn._replace(info={**turn.info, "seat": self.seat})

    def state_key(self) -> str:
        return self.game.state_key()

    def describe(self) -> dict[str, Any]:
        return {"seat": self.seat}

    def sample_random_action(self) -> str:
        return self.action_rng().choice(self.game.legal_actions(self.seat))

    def demonstrate(self, rng: random.Random, player: str = "") -> Trace:
        """The seat's side of a game that `player` plays; "": the game's teacher."""
        twin = self.fork()
        game, act = twin.game, self.game.player(player or self.game.teacher)
        trace: Trace = []
        turn = Turn()
        while not turn.is_over:
            trace += [(Author.ENV, turn.observation)] if trace else []
            trace.append((Author.POLICY, act(game, twin.seat, rng)))
            turn = twin.step(trace[-1][1])
        return trace

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "game": self.game.get_state()}

    def set_state(self, state: Any) -> None:
        super().set_state(state)
        game = self.game
        game.set_state(state["game"])
        others = {agent: game.opponent for agent in game.agents if agent != self.seat}
        game.players = {**others, **game.fixed}

    def close(self) -> None:
        self.game.close()
