"""The base class of games for several agents, and one seat of a game as an environment."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

import graft
from graft.envs.multi_agent.base import MultiAgentEnv
from graft.types import Turn
from graft.user_code import UserCodeError
from graft_envs.selfplay.split import SplitItems
from graft_envs.selfplay.tictactoe import TicTacToe


class CountUp(MultiAgentEnv):
    """Three agents say 1, 2, 3, ... in turn; a wrong number is out and earns 0, the last one left 1."""

    agents = ("a", "b", "c")
    saved = (*MultiAgentEnv.saved, "number")

    def pose(self) -> dict[str, str]:
        self.number = 0
        return {agent: f"You are {agent}." for agent in self.agents}

    def respond(self, actions: Mapping[str, str]) -> dict[str, Turn]:
        ((agent, said),) = actions.items()
        self.number += 1
        if said == str(self.number):
            return {one: Turn(f"{agent}: {said}", reward=0.1) for one in self.live if one != agent}
        out = {agent: Turn("wrong", terminated=True)}
        left = [one for one in self.live if one != agent]
        if len(left) == 1:
            return {**out, left[0]: Turn("you won", reward=1.0, terminated=True)}
        return {**out, **{one: Turn(f"{agent} is out") for one in left}}

    def legal_actions(self, agent: str) -> list[str]:
        return [str(self.number + 1)]


def test_an_agent_that_waited_reads_all_moves_and_earns_their_sum():
    game = CountUp()
    assert game.reset(seed=0) == {"a": "You are a.", "b": "You are b.", "c": "You are c."}
    assert game.active == ("a",)
    assert game.step({"a": "1"}) == {"b": Turn("a: 1", reward=0.1)}
    assert game.active == ("b",)
    assert game.step({"b": "2"}) == {"c": Turn("a: 1\nb: 2", reward=0.2)}
    assert game.step({"c": "3"}) == {"a": Turn("b: 2\nc: 3", reward=0.2)}
    # a is out: it is told at once, b moves next and has heard c and a
    turns = game.step({"a": "9"})
    assert turns == {"a": Turn("wrong", terminated=True), "b": Turn("c: 3\na is out", reward=0.1)}
    assert game.active == ("b",)
    turns = game.step({"b": "x"})
    assert turns["c"] == Turn("a is out\nyou won", reward=1.0, terminated=True)
    assert game.active == () and game.live == []
    assert game.earned == pytest.approx({"a": 0.2, "b": 0.2, "c": 1.2})
    with pytest.raises(RuntimeError, match="reset"):
        game.step({"a": "1"})


def test_programs_play_their_seats_and_only_the_others_are_asked():
    game = CountUp(players={"a": "random", "c": "random"})
    assert game.reset(seed=0)["b"] == "You are b.\na: 1"
    assert game.active == ("b",)
    assert game.step({"b": "2"}) == {"b": Turn("c: 3\na: 4", reward=0.2)}


def test_a_forfeit_ends_the_game_by_the_rules():
    game = CountUp()
    game.reset(seed=0)
    turns = game.forfeit(["a"])
    assert [turn.reward for turn in turns.values()] == [-1.0, 0.0, 0.0]
    assert not game.active and all(turn.terminated for turn in turns.values())
    with pytest.raises(ValueError, match="cannot give up"):
        game.forfeit(["b"])


def test_actions_of_other_agents_are_refused():
    game = TicTacToe()
    game.reset(seed=0)
    with pytest.raises(ValueError, match=r"actions for \['O'\], and \['X'\] must act now"):
        game.step({"O": "\\boxed{1}"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seat": "Z"}, "no seat 'Z'"),
        ({"players": {"X": "random", "O": "random"}}, "at least one seat"),
        ({"players": {"X": "random"}, "seat": "X"}, "played by a program"),
        ({"opponent": "minmax"}, "did you mean 'minimax'"),
        ({"syntax": "long"}, "must be one of words, compact"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        graft.make("selfplay:tictactoe", **settings)


def test_a_game_that_poses_something_else_is_refused_by_name():
    class Broken(CountUp):
        def pose(self):
            return "hello"

    with pytest.raises(UserCodeError, match=r"Broken.pose .* returned the text 'hello'"):
        Broken().reset(0)

    class Alone(CountUp):
        agents = ("a",)

    with pytest.raises(UserCodeError, match="two agents or more"):
        Alone()


def test_a_plain_loop_plays_tictactoe_to_its_end():
    """X 1 2 3 against O 4 5: X wins."""
    game, moves = TicTacToe(), iter("14253")
    seen = game.reset(seed=7)
    while game.active:
        turns = game.step({agent: f"\\boxed{{{next(moves)}}}" for agent in game.active})
        seen |= {agent: turn.observation for agent, turn in turns.items()}
    assert game.earned == {"X": 1.0, "O": -1.0}
    assert seen["O"] == "X took 3 and wins."
    assert game.cells == "XXXOO...."


@pytest.mark.parametrize(
    ("moves", "rewards"),
    [
        ("11", {"X": 1.0, "O": -1.0}),  # O takes a cell that is not free
        ("0", {"X": -1.0, "O": 1.0}),
        ("é", {"X": -1.0, "O": 1.0}),
        ("159287364", {"X": 0.0, "O": 0.0}),
    ],
)
def test_tictactoe_by_hand(moves: str, rewards: dict[str, float]):
    game = TicTacToe()
    game.reset(seed=0)
    for move in moves:
        game.step({game.active[0]: f"\\boxed{{{move}}}"})
    assert game.earned == rewards and not game.active


def test_minimax_never_loses():
    for seed in range(6):
        for opponent in ("random", "minimax"):
            env = graft.make("selfplay:tictactoe", opponent=opponent, seat="XO"[seed % 2])
            env.reset(seed)
            act, turn = env.game.player("minimax"), Turn()
            while not turn.is_over:
                turn = env.step(act(env.game, env.seat, env.rng))
            assert turn.reward >= 0.0
            assert opponent == "random" or turn.reward == 0.0  # two perfect players draw


def test_split_by_hand():
    """The example of the module's docstring."""
    game = SplitItems()
    game.reset(seed=0)
    game.values = {"A": {"hat": 7, "pen": 3, "cup": 0}, "B": {"hat": 0, "pen": 4, "cup": 6}}
    assert game.active == ("A", "B")
    turns = game.step({"A": "\\boxed{hat pen}", "B": "\\boxed{pen, cup}"})
    assert turns["A"].observation == turns["B"].observation
    assert "You both want: pen" in turns["A"].observation and "(2 more)" in turns["A"].observation
    turns = game.step({"A": "\\boxed{hat}", "B": "\\boxed{cup pen}"})
    assert {agent: turn.reward for agent, turn in turns.items()} == {"A": 0.7, "B": 1.0}


def test_split_without_agreement_earns_nothing_and_a_bad_claim_loses():
    game = SplitItems(rounds=1)
    game.reset(seed=0)
    turns = game.step({"A": "\\boxed{hat}", "B": "\\boxed{hat}"})
    assert [turn.reward for turn in turns.values()] == [0.0, 0.0]
    game.reset(seed=1)
    turns = game.step({"A": "\\boxed{nothing}", "B": "\\boxed{house}"})
    assert [turn.reward for turn in turns.values()] == [0.0, -1.0]


def test_agents_of_split_see_only_their_own_values():
    game = SplitItems()
    seen = game.reset(seed=5)
    for agent in game.agents:
        own = ", ".join(f"{item} {worth}" for item, worth in game.values[agent].items())
        assert [own in seen[one] for one in game.agents] == [one == agent for one in game.agents]


def test_a_game_of_ones_own_is_an_environment_of_one_seat():
    env = graft.make(CountUp, seat="b")
    assert env.reset(seed=3)[0] == "You are b.\na: 1"
    turn = env.step("2")
    assert (turn.observation, turn.reward) == ("c: 3\na: 4", 0.2)
    restored = graft.make(CountUp, seat="b")
    restored.set_state(json.loads(json.dumps(env.get_state())))
    assert restored.step("5") == env.step("5")
