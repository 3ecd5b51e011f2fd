"""What 2048, Sokoban, crosswords, word search and the wiki game hold together."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.envs import make
from graft_envs.games.variants import GAMES

STEMS = ("Game2048", "Sokoban", "Crosswords", "WordSearch", "WikiGame")
GRID_GAMES = {
    name: entry
    for name, entry in GAMES.items()
    if name.removeprefix("game:").partition("-")[0] in STEMS
}
every_game = pytest.mark.parametrize("env_id", sorted(GRID_GAMES))
one_of_each = pytest.mark.parametrize(
    "env_id", [name for name in sorted(GRID_GAMES) if name.endswith("-v0")]
)

NASTY = [
    "\\boxed{",
    "}",
    "{",
    "9**9**9",
    "0 0 0 0",
    "1 1 A",
    "up",
    "<PREV_PAGE>",
    "é\x00",
    " ",
    "-1",
]
hostile = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from(NASTY), max_size=8).map("".join),
    st.lists(st.sampled_from(NASTY), max_size=4).map(lambda parts: f"\\boxed{{{''.join(parts)}}}"),
    st.sampled_from(["\\boxed{", "9", " ", "{", "é", "\\boxed{9 9 9 ", "\\boxed{A"]).map(
        lambda text: text * (1_000_000 // len(text))
    ),
    st.sampled_from(["9" * 900_000, " " * 900_000]).map("\\boxed{{{}}}".format),
)


def play(env: Any, actions: list[str]) -> list[Any]:
    turns = []
    for action in actions:
        turns.append(env.step(action))
        if turns[-1].is_over:
            break
    return turns


def test_the_ids_are_those_of_the_gym_and_plain_ones_mean_easy():
    variants = ("", "-easy", "-hard", "-random")
    wanted = {f"game:{stem}-v0{variant}" for stem in STEMS for variant in variants}
    wanted = wanted - {"game:WikiGame-v0-random"} | {"game:Game2048-v0-extreme-hard"}
    assert set(GRID_GAMES) == wanted
    turns = {name.removeprefix("game:"): entry.turns for name, entry in GRID_GAMES.items()}
    assert turns["Game2048-v0-extreme-hard"] == 100
    assert turns["Sokoban-v0-hard"] == 50
    assert turns["Crosswords-v0-hard"] == 40
    assert turns["Crosswords-v0-random"] == turns["WordSearch-v0-random"] == 20
    assert turns["Sokoban-v0-random"] is None
    assert turns["WikiGame-v0-hard"] == 15
    for stem in STEMS:
        assert GRID_GAMES[f"game:{stem}-v0"] == GRID_GAMES[f"game:{stem}-v0-easy"]


@every_game
def test_the_same_seed_and_actions_give_the_same_game_and_the_one_after_it(env_id: str):
    traces = []
    for _ in range(2):
        env = make(env_id)
        first = env.reset(seed=11)
        turns = play(env, [env.sample_random_action() for _ in range(6)])
        traces.append((first, turns, env.reset(), env.task()))
        random.seed(5)  # no env may draw from it
    assert traces[0] == traces[1]
    assert traces[0][0] != traces[0][2]


@every_game
def test_random_actions_are_never_format_errors_and_end_in_time(env_id: str):
    env = make(env_id)
    for seed in range(3):
        _, info = env.reset(seed=seed)
        limit = env.max_turns
        turns = []
        while not env.is_over:
            turns.append(env.step(env.sample_random_action()))
            assert len(turns) <= limit
            assert turns[-1].observation.endswith(turns[-1].info.get("suffix", ""))
        assert "required form" not in " ".join(turn.observation for turn in turns)
        assert -0.2 * limit <= sum(turn.reward for turn in turns) <= 1.0 + 1e-9
        json.dumps([info, *(turn.info for turn in turns)], allow_nan=False)


@every_game
def test_forks_and_saved_games_go_on_alike(env_id: str):
    env = make(env_id)
    env.reset(seed=4)
    env.step(env.sample_random_action())
    if env.is_over:
        pytest.skip("over at once")
    twin = env.fork()
    other = make(env_id)
    other.set_state(json.loads(json.dumps(env.get_state(), allow_nan=False)))
    assert other.max_turns == env.max_turns
    actions = [env.fork().sample_random_action(), "nothing", "more"]
    played = [play(one, actions) for one in (env, twin, other)]
    assert played[0] == played[1] == played[2]
    assert env.reset() == twin.reset() == other.reset()


@one_of_each
def test_an_action_without_a_box_is_a_format_error(env_id: str):
    env = make(env_id)
    env.reset(seed=0)
    turn = env.step("I do not know.")
    if "Wiki" in env_id:
        assert turn[1:4] == (-0.2, False, False)
    else:
        assert turn[1:4] == (-0.1, True, False)
        with pytest.raises(RuntimeError, match="reset"):
            env.step("again")


@one_of_each
def test_the_last_box_counts(env_id: str):
    env = make(env_id)
    env.reset(seed=0)
    action = env.sample_random_action()
    twin = env.fork()
    assert env.step(action) == twin.step(f"Not \\boxed{{that}}, but {action}. \\boxed{{ and so on")


@one_of_each
@settings(max_examples=25)
@given(actions=st.lists(hostile, min_size=1, max_size=4), seed=st.integers(0, 9))
def test_no_action_makes_it_raise(env_id: str, actions: list[str], seed: int):
    env = make(env_id)
    env.reset(seed=seed)
    for turn in play(env, actions):
        assert -0.2 <= turn.reward <= 1.0
        assert len(turn.observation) < 8000
        json.dumps(turn.info, allow_nan=False).encode()


def test_what_is_given_to_a_random_variant_is_never_drawn():
    for seed in range(8):
        game = make("game:Game2048-v0-random", target_tile=32)
        game.reset(seed)
        assert (game.target_tile, game.max_turns) == (32, 30)
        room = make("game:Sokoban-v0-random", dim_room=[6, 6], max_turns=40)
        room.reset(seed)
        assert (room.rows, room.cols, room.num_boxes, room.max_turns) == (6, 6, 2, 40)
        hard = make("game:Crosswords-v0-hard", num_words=None, max_turns=None)
        hard.reset(seed)
        assert (hard.hardcore, len(hard.answer), hard.max_turns) == (True, 3, 20)
        words = make("game:WordSearch-v0-easy", num_words=None)
        words.reset(seed)
        assert (words.hardcore, len(words.answer)) == (False, 5)
    drawn = make("game:Sokoban-v0-random")
    assert {drawn.reset(seed) and (drawn.num_boxes, drawn.max_turns) for seed in range(12)} == {
        (2, 20),
        (5, 50),
    }


@pytest.mark.parametrize(
    ("env_id", "wrong"),
    [
        ("game:Game2048-v0", {"board_size": 10**6}),
        ("game:Game2048-v0", {"target_tile": 128, "max_turns": None}),
        ("game:Sokoban-v0", {"dim_room": 6}),
        ("game:Sokoban-v0-random", {"dim_room": (7, 7)}),
        ("game:Crosswords-v0", {"num_words": 0}),
        ("game:WordSearch-v0", {"num_words": 0}),
        ("game:WikiGame-v0", {"max_turns": None}),
        ("game:WikiGame-v0", {"page_summary_length": 100}),
    ],
)
def test_a_size_that_cannot_be_played_is_refused_at_once(env_id: str, wrong: dict[str, Any]):
    with pytest.raises(ValueError, match=r"must|give all values"):
        make(env_id, **wrong)


def test_the_rewards_of_a_won_game_add_up_to_one_to_the_last_bit():
    for seed in range(6):
        crossword = make("game:Crosswords-v0-hard", num_words=4, max_turns=60)
        crossword.reset(seed)
        letters = [
            f"\\boxed{{{row} {col} {letter}}}"
            for row, cells in enumerate(crossword.solution)
            for col, letter in enumerate(cells)
            if letter != "."
        ]
        assert sum(turn.reward for turn in play(crossword, letters)) == 1.0
        search = make("game:WordSearch-v0-easy", num_words=6)
        _, info = search.reset(seed)
        found = [f"\\boxed{{{where}}}" for where in info["answer"].values()]
        assert sum(turn.reward for turn in play(search, found)) == 1.0
        assert search.is_over


@one_of_each
def test_a_random_action_needs_no_reset(env_id: str):
    assert "\\boxed{" in make(env_id).sample_random_action()
