r"""What the eight board, number and word games share: boxes, turns, limits, states, random actions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.envs import make
from graft_envs.games.base import echo, last_box, playable_sizes, whole
from graft_envs.games.guess import GuessTheNumber
from graft_envs.games.variants import GAMES
from tests.envs.env_kit import play

OUT_OF_RULES = {  # parsable in each game, never legal
    "GuessTheNumber": "\\boxed{1000}",
    "Mastermind": "\\boxed{99 99}",
    "Minesweeper": "\\boxed{reveal 50 50}",
    "Wordle": "\\boxed{INTERNATIONALISATION}",
    "Hangman": "\\boxed{INTERNATIONALISATION}",
    "FifteenPuzzle": "\\boxed{up}",  # made illegal below: the gap goes to the last row
    "Sudoku": "\\boxed{50 1 1}",
    "TowerofHanoi": "\\boxed{B C}",
}


def stem(env_id: str) -> str:
    return env_id.removeprefix("game:").partition("-")[0]


SHARED = {name: entry for name, entry in GAMES.items() if stem(name) in OUT_OF_RULES}
every_game = pytest.mark.parametrize("env_id", sorted(SHARED))


def stuck(env_id: str, seed: int = 0, **kwargs: Any) -> tuple[Any, str]:
    """A fresh game and an action that its rules refuse."""
    env = make(env_id, **kwargs)
    env.reset(seed)
    if stem(env_id) == "FifteenPuzzle":
        gap = env.tiles.index(0)
        env.tiles[gap], env.tiles[-1] = env.tiles[-1], 0
    return env, OUT_OF_RULES[stem(env_id)]


def wander(env: Any) -> list[str]:
    """Random actions up to the end of the game."""
    env = env.fork()
    actions: list[str] = []
    while not env.is_over:
        actions.append(env.sample_random_action())
        env.step(actions[-1])
    return actions


def test_the_table_holds_the_variants_with_their_sizes_and_turn_limits():
    assert len(SHARED) == 8 * 4 + 2
    rows = {
        name.removeprefix("game:"): (tuple(entry.args.values()), entry.turns)
        for name, entry in SHARED.items()
    }
    assert rows["GuessTheNumber-v0"] == ((1, 20, 10), 10)
    assert rows["GuessTheNumber-v0-easy"] == ((1, 10, 4), 4)
    assert rows["GuessTheNumber-v0-hard"] == ((1, 50, 7), 7)
    assert rows["GuessTheNumber-v0-hard-no-max-turn"] == ((1, 50, 50), 50)
    assert rows["Mastermind-v0"] == ((4, 6, 20), 20)
    assert rows["Mastermind-v0-easy"] == ((2, 6, 10), 10)
    assert rows["Mastermind-v0-hard"] == ((4, 8, 30), 30)
    assert rows["Minesweeper-v0"] == ((8, 8, 10, 100), 100)
    assert rows["Minesweeper-v0-very-easy"] == ((3, 3, 1, 10), 10)
    assert rows["Minesweeper-v0-easy"] == ((5, 5, 5, 25), 25)
    assert rows["Minesweeper-v0-hard"] == ((8, 8, 12, 64), 64)
    assert rows["Wordle-v0"] == ((5, 15), 15)
    assert rows["Wordle-v0-easy"] == ((3, 15), 15)
    assert rows["Wordle-v0-hard"] == ((5, 25), 25)
    assert rows["Hangman-v0"] == ((5, 15), 15)
    assert rows["Hangman-v0-easy"] == ((3, 10), 10)
    assert rows["Hangman-v0-hard"] == ((7, 20), 20)
    assert rows["FifteenPuzzle-v0"] == ((3, 20), 20)
    assert rows["FifteenPuzzle-v0-easy"] == ((2, 10), 10)
    assert rows["FifteenPuzzle-v0-hard"] == ((4, 50), 50)
    assert rows["Sudoku-v0"] == rows["Sudoku-v0-hard"] == ((9, 50, 50), 50)
    assert rows["Sudoku-v0-easy"] == ((4, 10, 15), 15)
    assert rows["TowerofHanoi-v0"] == ((4, 20), 20)
    assert rows["TowerofHanoi-v0-easy"] == ((3, 10), 10)
    assert rows["TowerofHanoi-v0-hard"] == ((5, 35), 35)
    for name, (args, turns) in rows.items():
        if name.endswith("-random"):
            assert set(args) == {None}
            assert turns is None


@every_game
def test_the_first_board_ends_the_prompt_and_each_later_one_its_observation(env_id: str):
    env = make(env_id)
    prompt, info = env.reset(seed=5)
    assert prompt.endswith(info["suffix"])
    assert "\\boxed{" in prompt.removesuffix(info["suffix"])
    assert f"You have {env.max_turns} turns" in prompt
    for turn in play(env, wander(env)):
        if not turn.is_over:
            assert turn.observation.endswith(turn.info["suffix"])


@every_game
def test_an_action_in_no_known_form_ends_the_game_and_costs_a_tenth(env_id: str):
    for text in ("", "5", "\\boxed{}", "\\boxed{?}", "boxed{A}", "\\boxed{3", "\\boxed{é}"):
        env = make(env_id)
        env.reset(seed=1)
        turn = env.step(text)
        assert (turn.reward, turn.terminated, turn.truncated) == (-0.1, True, False)
        with pytest.raises(RuntimeError, match="reset"):
            env.step(text)


@every_game
def test_a_format_error_on_the_last_turn_is_truncated_too(env_id: str):
    env, refused = stuck(env_id, max_turns=2)
    env.step(refused)
    turn = env.step("nothing")
    assert (turn.reward, turn.terminated, turn.truncated) == (-0.1, True, True)


@every_game
def test_an_invalid_move_changes_nothing_but_the_turn(env_id: str):
    env, refused = stuck(env_id)
    before = env.get_state()
    turn = env.step(refused)
    assert (turn.reward, turn.terminated, turn.truncated) == (0.0, False, False)
    assert "invalid" in turn.observation
    assert env.get_state() == {**before, "turns": 1}


@every_game
def test_the_turn_limit_is_terminated_and_truncated_and_keeps_the_last_feedback(env_id: str):
    env, refused = stuck(env_id, max_turns=3)
    first = env.step(refused)
    env.step(refused)
    last = env.step(refused)
    assert (last.terminated, last.truncated) == (True, True)
    repeated = first.observation.partition("\n")[0].removeprefix("Turn 1: ")
    assert f"Turn 3: {repeated}\nAll 3 turns are used up" in last.observation


@every_game
def test_suggestions_are_parsable_legal_and_do_not_change_the_instance(env_id: str):
    for seed in range(4):
        env, other = make(env_id), make(env_id)
        env.reset(seed)
        other.reset(seed)
        actions = wander(env)
        turns = play(env, actions)
        assert all(turn.reward != -0.1 for turn in turns)
        for action, turn in zip(actions, turns, strict=True):
            for _ in range(3):
                other.sample_random_action()
            assert other.step(action) == turn
        assert other.reset() == env.reset()
    env = make(env_id)
    env.sample_random_action()  # before the first reset too
    env.reset(seed=0)
    env.step("over")
    env.sample_random_action()


@every_game
def test_rewards_lie_in_their_range_and_never_add_up_to_more_than_one(env_id: str):
    for seed in range(6):
        env = make(env_id)
        env.reset(seed)
        turns = play(env, wander(env))
        assert turns[-1].is_over
        assert len(turns) <= env.max_turns
        assert all(0.0 <= turn.reward <= 1.0 for turn in turns)
        assert sum(turn.reward for turn in turns) <= 1.0


@every_game
def test_a_state_read_from_json_goes_on_as_the_original_does(env_id: str):
    for seed in range(3):
        env = make(env_id)
        env.reset(seed)
        actions = wander(env)
        half = len(actions) // 2
        play(env, actions[:half])
        state = json.loads(json.dumps(env.get_state(), allow_nan=False))
        other, fork = make(env_id), env.fork()
        other.set_state(state)
        rest = play(env, actions[half:])
        assert play(other, actions[half:]) == rest
        assert play(fork, actions[half:]) == rest
        assert other.reset() == env.reset() == fork.reset()
        json.dumps([turn.info for turn in rest], allow_nan=False)


@every_game
def test_a_seed_fixes_the_game_and_seeds_differ(env_id: str):
    one, two = make(env_id), make(env_id)
    two.reset(seed=77)
    two.step("x")
    prompts = set[str]()
    for seed in range(12):
        assert one.reset(seed=seed) == two.reset(seed=seed)
        prompts.add(str(one.answer) + one.board())
    if stem(env_id) not in ("TowerofHanoi", "Minesweeper"):  # these start from one position
        assert len(prompts) > 3


@pytest.mark.parametrize("env_id", [name for name in SHARED if name.endswith("-random")])
def test_a_random_variant_draws_its_sizes_and_its_turns(env_id: str):
    limits = set[int]()
    for seed in range(30):
        env = make(env_id)
        env.reset(seed)
        limits.add(env.max_turns)
        assert env.get_state()["max_turns"] == env.max_turns
        short = make(env_id, max_turns=2)
        short.reset(seed)
        assert short.max_turns == 2
    expected = {
        "Mastermind": {10, 20, 30},
        "Minesweeper": {25, 36, 49, 64},
        "Wordle": {15, 20, 25},
        "Hangman": {10, 15, 20},
        "FifteenPuzzle": {10, 20, 50},
        "Sudoku": {15, 50},
        "TowerofHanoi": {10, 20, 35},
    }
    name = stem(env_id)
    assert limits == expected[name] if name in expected else len(limits) > 3


BAD_CALLS = [
    ("GuessTheNumber", {"min_number": 5, "max_number": 5}, "max_number=5"),
    ("GuessTheNumber", {"min_number": None, "max_number": 10}, "drawn from 1..10"),
    ("GuessTheNumber", {"min_number": -3}, "min_number=-3"),
    ("Mastermind", {"code_length": 7, "num_numbers": 6}, "duplicate_numbers=True"),
    ("Mastermind", {"code_length": 0}, "1 or more"),
    ("Mastermind", {"code_length": 3, "num_numbers": None}, "none of them fits"),
    ("Minesweeper", {"num_mines": 64}, "1 to 63 mines"),
    ("Minesweeper", {"rows": 0}, "1 or more"),
    ("Wordle", {"word_length": 11}, "3 to 10 letters"),
    ("Hangman", {"word_length": 2}, "3 to 10 letters"),
    ("Hangman", {"word_length": 16, "hardcore": True}, "3 to 15 letters"),
    ("FifteenPuzzle", {"num_rows": 1}, "2 to 10"),
    ("FifteenPuzzle", {"init_algo": "walk"}, "monte_carlo, pure_random"),
    ("FifteenPuzzle", {"mc_rand_moves": 0}, "1 or more"),
    ("Sudoku", {"scale": 8}, "4 or 9"),
    ("Sudoku", {"clues": 0}, "1 to 81"),
    ("TowerofHanoi", {"num_disks": 0}, "1 to 100"),
    ("TowerofHanoi", {"max_turns": 0}, "max_turns=0"),
]


@pytest.mark.parametrize(("name", "kwargs", "message"), BAD_CALLS)
def test_impossible_sizes_are_refused_with_a_reason(
    name: str, kwargs: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        make(f"game:{name}-v0", **kwargs)


def test_missing_sizes_come_from_the_rows_that_fit_the_given_ones():
    known = ((3, 10), (5, 15))
    assert playable_sizes(known, word_length=4, max_turns=9) == ((4, 9),)
    assert playable_sizes(known, word_length=5, max_turns=None) == ((5, 15),)
    assert playable_sizes(known, word_length=None, max_turns=9) == ((3, 9), (5, 9))
    assert playable_sizes(known, word_length=None, max_turns=None) == known
    with pytest.raises(ValueError, match="word_length=4, max_turns=None"):
        playable_sizes(known, word_length=4, max_turns=None)


def test_the_last_box_that_parses_counts():
    assert last_box(GuessTheNumber.pattern, "\\boxed{3} or \\boxed{ 7 }, \\boxed{x}")[1] == "7"  # pyright: ignore
    assert last_box(GuessTheNumber.pattern, "\\boxed{3") is None


def test_numbers_and_echoes_stay_short():
    assert whole("0007") == 7
    assert whole("9" * 1_000_000) == 10**18
    assert echo("x" * 41) == "x" * 40 + "..."


def test_thirds_add_up_to_one_to_the_last_bit():
    for parts in range(1, 82):
        game = GuessTheNumber()
        total = 0.0
        for done in range(1, parts + 1):
            total += game.earn(done / parts)
            assert total <= 1.0
        assert total == 1.0


BOXED = st.one_of(
    st.text(max_size=30),
    st.text(alphabet="0123456789 ,ABCabc\t\n-+.", max_size=30),
    st.sampled_from(["9**9**9", "0 0 0", "reveal 0 0", "flag 1 1", "٣", "1 1 1", "ſ", "K", "-1"]),
)
HOSTILE = st.one_of(
    st.text(max_size=60),
    BOXED.map("\\boxed{{{}}}".format),
    BOXED.map("\\boxed{{{}".format),
    BOXED.map("<answer>{}</answer>".format),
    st.sampled_from(
        [
            "\\boxed{" * 140_000,
            "\\boxed{" + " " * 1_000_000,
            "\\boxed{1" + " " * 1_000_000 + "1",
            "\\boxed{A" + " " * 1_000_000 + "?}",
            "\\boxed{" + "9" * 1_000_000 + "}",
            "\\boxed{" + "1 " * 500_000 + "}",
            "\\boxed{1 " * 120_000,
            "\\boxed{A " * 120_000 + "B}",
            "\\boxed{" + "A" * 1_000_000 + "}",
            "\\boxed{reveal " + "1" * 900_000 + " 2}",
            "{" * 1_000_000,
            "é\x00" * 300_000,
        ]
    ),
)


@pytest.mark.parametrize("name", sorted({stem(env_id) for env_id in SHARED}))
@settings(deadline=None, max_examples=20)
@given(actions=st.lists(HOSTILE, min_size=1, max_size=6), seed=st.integers(0, 50))
def test_no_action_makes_a_game_raise_or_talk_without_end(name: str, actions: list[str], seed: int):
    env = make(f"game:{name}-v0-random")
    env.reset(seed)
    for turn in play(env, actions):
        assert -0.1 <= turn.reward <= 1.0
        assert len(turn.observation) < 1500
        json.dumps(turn.info, allow_nan=False)
