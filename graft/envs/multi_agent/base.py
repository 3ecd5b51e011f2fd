"""The base class of environments with several agents: who moves, what each agent sees and earns.

    game = TicTacToe()
    seen = game.reset(seed=7)                  {"X": "You are X ...", "O": "You are O ..."}
    while game.active:                         ("X",), then ("O",), ...
        actions = {agent: policies[agent](seen[agent]) for agent in game.active}
        turns = game.step(actions)             {"O": Turn("X took 5. ...")}
        seen |= {agent: turn.observation for agent, turn in turns.items()}

`step` answers the agents that move next and those whose game is over. Their Turn holds everything
since their last action: an agent that waited for two others reads both moves, and earns the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, ClassVar

from graft.envs.base import CopyableEnv
from graft.envs.checked import as_turn, check_action
from graft.registry import resolve
from graft.signatures import explain_arguments
from graft.types import Turn
from graft.user_code import UserCodeError, UserObject, refusal

Player = Callable[["MultiAgentEnv", str, Random], str]
"""(game, agent, generator) -> action: a program that plays a seat."""

ORDERS = ("sequential", "simultaneous")


def random_player(game: MultiAgentEnv, agent: str, rng: Random) -> str:
    """Any legal action, each equally likely."""
    return rng.choice(game.legal_actions(agent))


class MultiAgentEnv(CopyableEnv):
    """Several named agents; a subclass writes `pose`, `respond` and `legal_actions`.

    `players` names the program of a seat that no policy plays: {"O": "random"}. The other three
    settings are read by `SeatEnv`, the environment of one seat: `opponent` plays all seats except
    `seat` (None: drawn with each instance), and with `self_play` rollouts play every seat by a policy.
    """

    agents: tuple[str, ...] = ()
    """The names of the seats, in the order in which they move."""
    turn_order = "sequential"
    """"sequential": one agent at a time; "simultaneous": all of them, none sees the others' actions."""
    forfeit_reward = -1.0
    PLAYERS: ClassVar[Mapping[str, Player]] = {}
    """Programs that play this game by name, besides "random"."""
    teacher = "random"
    """The player that `demonstrate` shows."""
    saved: tuple[str, ...] = ("seed", "live", "active", "pending", "earned")

    @explain_arguments
    def __init__(
        self,
        *,
        players: Mapping[str, str | Player] | None = None,
        opponent: str | Player = "random",
        seat: str | None = None,
        self_play: bool = True,
    ) -> None:
        super().__init__()
        if len(set(self.agents)) < 2 or len(set(self.agents)) != len(self.agents):
            raise UserCodeError(
                f"{type(self).__name__}.agents = {self.agents!r}; name two agents or more, all different"
            )
        if self.turn_order not in ORDERS:
            raise UserCodeError(
                f"{type(self).__name__}.turn_order = {self.turn_order!r}; it must be one of {ORDERS}"
            )
        self.fixed = {
            self._checked(name): self.player(one) for name, one in (players or {}).items()
        }
        if len(self.fixed) == len(self.agents):
            raise ValueError(f"players={dict(players or {})}: a policy must play at least one seat")
        self.opponent = self.player(opponent)
        self.seat = None if seat is None else self._checked(seat)
        if self.seat in self.fixed:
            raise ValueError(
                f"seat={seat!r} is played by a program (players); leave one of them out"
            )
        self.self_play = self_play
        self.players: dict[str, Player] = dict(self.fixed)
        """The seats that programs play at present."""
        self.live: list[str] = []  # agents whose game is not over
        self.active: Sequence[str] = ()
        """The agents that must act now; empty: the game is over."""
        self.pending: dict[str, list[Any]] = {}  # the five values of a Turn, since the last action
        self.earned: dict[str, float] = {}
        """The sum of each agent's rewards."""

    def state_key(self) -> str:
        """The position, hidden parts included."""
        return self.saved_beyond(MultiAgentEnv.saved)

    def pose(self) -> Mapping[str, str]:
        """Draw an instance from `self.rng`; return what each agent sees first."""
        raise NotImplementedError(f"{type(self).__name__} must write pose()")

    def respond(self, actions: Mapping[str, str]) -> Mapping[str, Turn]:
        """Play the actions of `self.active`; return a Turn for each agent that learns something.

        It must not raise, whatever a policy wrote. An agent whose Turn is over moves no more.
        """
        raise NotImplementedError(f"{type(self).__name__} must write respond()")

    def legal_actions(self, agent: str) -> Sequence[str]:
        """The actions that the rules allow an active agent, as texts."""
        raise NotImplementedError(f"{type(self).__name__} must write legal_actions()")

    def lose(self, agents: Sequence[str]) -> Mapping[str, Turn]:
        """These agents cannot go on: they broke the rules, or a limit cut their action off.

        By default the game ends for all, they earn `forfeit_reward` and the others nothing.
        """
        return {
            agent: Turn(
                f"{' and '.join(agents)} gave up; the game is over.",
                self.forfeit_reward if agent in agents else 0.0,
                terminated=True,
            )
            for agent in self.live
        }

    def next_agents(self) -> Sequence[str]:
        """The agents that act next, of those still in the game."""
        if self.turn_order == "simultaneous" or not self.active:
            return tuple(self.live) if self.turn_order == "simultaneous" else tuple(self.live[:1])
        last = self.agents.index(self.active[-1])
        following = (*self.agents[last + 1 :], *self.agents[: last + 1])
        return tuple([agent for agent in following if agent in self.live][:1])

    def reset(self, seed: int | None = None) -> dict[str, str]:
        """The first observation of each agent. The same seed poses the same instance."""
        self.begin_stream(seed)
        self.live, self.active, self.pending = [*self.agents], (), {}
        self.earned = dict.fromkeys(self.agents, 0.0)
        who = UserObject(self, "env", "pose")
        seen: Any = self.pose()
        if not isinstance(seen, Mapping) or set(seen) != set(self.agents):
            raise refusal(who, seen, f"a dict with a text for each of {', '.join(self.agents)}")
        for text in seen.values():
            if not isinstance(text, str):
                raise refusal(who, text, "a text for each agent")
        self.active = tuple(self.next_agents())
        first = dict(seen)
        self._play_programs()
        if not self.active:
            raise UserCodeError(
                f"the players of {type(self).__name__} ended the game before a policy could act, with the "
                f"rewards {self.earned}; a program must play legal moves"
            )
        for agent in self.active:
            if turn := self._taken(agent):
                first[agent] = joined(first[agent], turn.observation)
        return first

    def step(self, actions: Mapping[str, str]) -> dict[str, Turn]:
        """Act for every active agent; a Turn for each that moves next or is out of the game."""
        waiting = [agent for agent in self.active if agent not in self.players]
        if not self.active:
            raise RuntimeError(f"env {self.env_id!r}: no game is running; call reset() first")
        if set(actions) != set(waiting):
            raise ValueError(
                f"actions for {sorted(actions)}, and {sorted(waiting)} must act now; see game.active"
            )
        for action in actions.values():
            check_action(action)
        self._advance(actions)
        return self._answers()

    def forfeit(self, agents: Sequence[str]) -> dict[str, Turn]:
        """Active agents that give no action lose by the rules; `step` for a policy that was cut off."""
        strange = [agent for agent in agents if agent not in self.active]
        if strange or not agents:
            raise ValueError(f"{list(agents)} cannot give up; {list(self.active)} must act now")
        self._record(self.lose(agents))
        if left := [agent for agent in agents if agent in self.live]:
            raise UserCodeError(
                f"{UserObject(self, 'env', 'lose')} gave no last Turn to {left[0]}, which gave up; return "
                "one with terminated=True"
            )
        return self._answers()

    def player(self, name: str | Player) -> Player:
        """A program by its name, or your own function or "module:attr"."""
        return resolve(name, {"random": random_player, **self.PLAYERS}, "player")

    def _checked(self, agent: str) -> str:
        if agent not in self.agents:
            raise ValueError(f"there is no seat {agent!r}; known: {', '.join(self.agents)}")
        return agent

    def _answers(self) -> dict[str, Turn]:
        self._play_programs()
        answered = [
            agent for agent in self.agents if agent not in self.players and self._is_answered(agent)
        ]
        return {agent: self._taken(agent) or Turn() for agent in answered}

    def _is_answered(self, agent: str) -> bool:
        return agent in self.active or (agent not in self.live and agent in self.pending)

    def _play_programs(self) -> None:
        """Let programs act until a policy has to, or the game is over."""
        while self.active and all(agent in self.players for agent in self.active):
            self._advance({})

    def _advance(self, actions: Mapping[str, str]) -> None:
        chosen = {
            agent: actions[agent]
            if agent in actions
            else self.players[agent](self, agent, self.rng)
            for agent in self.active
        }
        self._record(self.respond(chosen))

    def _record(self, turns: Any) -> None:
        """Add the turns to what each agent has not been shown yet, and decide who acts next."""
        who = UserObject(self, "env", "respond")
        if not isinstance(turns, Mapping) or not set(turns) <= set(self.live):
            raise refusal(who, turns, f"a dict from agents ({', '.join(self.live)}) to Turns")
        for agent, value in turns.items():
            turn = as_turn(value, who)
            text, reward, _, _, info = self.pending.get(agent) or ["", 0.0, False, False, {}]
            self.pending[agent] = [
                joined(text, turn.observation),
                reward + turn.reward,
                turn.terminated,
                turn.truncated,
                {**info, **turn.info},
            ]
            self.earned[agent] += turn.reward
            if turn.is_over:
                self.live.remove(agent)
        self.active = tuple(self.next_agents()) if self.live else ()

    def _taken(self, agent: str) -> Turn | None:
        values = self.pending.pop(agent, None)
        return None if values is None else Turn(*values)


def joined(first: str, second: str) -> str:
    """Two texts as lines: "a", "b" -> "a\\nb"; an empty one adds nothing."""
    return f"{first}\n{second}" if first and second else first or second


def read_move(text: str) -> str:
    r"""What stands in the last box, or the whole text: "I take \boxed{5}" -> "5", " 5\n" -> "5"."""
    at = text.rfind("\\boxed{")
    if at < 0:
        return text.strip()
    return text[at + len("\\boxed{") :].partition("}")[0].strip()
