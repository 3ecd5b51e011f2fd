"""What the games share: boxes, turns, limits, sizes, random actions."""

from __future__ import annotations

from typing import Any

import pytest

from graft.envs import make
from graft_envs.games.base import echo, playable_sizes, whole
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
every_game = pytest.mark.parametrize(
    "env_id", [name for name in sorted(SHARED) if name.endswith(("-v0", "-random"))]
)
one_of_each = pytest.mark.parametrize(
    "env_id", [name for name in sorted(GAMES) if name.endswith("-v0")]
)


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


SIZES = """
GuessTheNumber 1 20 10, easy 1 10 4, hard 1 50 7, hard-no-max-turn 1 50 50
Mastermind 4 6 20, easy 2 6 10, hard 4 8 30
Minesweeper 8 8 10 100, very-easy 3 3 1 10, easy 5 5 5 25, hard 8 8 12 64
Wordle 5 15, easy 3 15, hard 5 25
Hangman 5 15, easy 3 10, hard 7 20
FifteenPuzzle 3 20, easy 2 10, hard 4 50
Sudoku 9 50 50, easy 4 10 15, hard 9 50 50
TowerofHanoi 4 20, easy 3 10, hard 5 35
"""


def test_the_table_holds_the_variants_with_their_sizes_and_turn_limits():
    assert len(SHARED) == 8 * 4 + 2
    rows = {name: (entry.args.values(), entry.turns) for name, entry in SHARED.items()}
    for line in SIZES.split("\n")[1:-1]:
        first, *others = line.split(", ")
        name, _, plain = first.partition(" ")
        wanted = {"": plain, **{f"-{o.split()[0]}": o.partition(" ")[2] for o in others}}
        for variant, sizes in wanted.items():
            args, turns = rows[f"game:{name}-v0{variant}"]
            assert [*args] == [int(size) for size in sizes.split()]
            assert turns == [*args][-1]
    for name, (args, turns) in rows.items():
        if name.endswith("-random"):
            assert {*args, turns} == {None}
    turns = {name.removeprefix("game:"): entry.turns for name, entry in GAMES.items()}
    assert turns["Game2048-v0-extreme-hard"] == 100
    assert turns["Sokoban-v0-hard"] == 50 and turns["Sokoban-v0-random"] is None
    assert turns["Crosswords-v0-hard"] == 40 and turns["WikiGame-v0-hard"] == 15
    assert turns["Crosswords-v0-random"] == turns["WordSearch-v0-random"] == 20
    for grid in ("Game2048", "Sokoban", "Crosswords", "WordSearch", "WikiGame"):
        assert GAMES[f"game:{grid}-v0"] == GAMES[f"game:{grid}-v0-easy"]


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


@one_of_each
def test_an_action_in_no_known_form_ends_the_game_and_costs_a_tenth(env_id: str):
    for text in ("", "5", "\\boxed{}", "\\boxed{?}", "boxed{A}", "\\boxed{3", "\\boxed{é}"):
        env = make(env_id)
        assert "\\boxed{" in env.sample_random_action()  # before the first reset too
        env.reset(seed=1)
        turn = env.step(text)
        if "WikiGame" in env_id:  # it goes on there
            assert turn[1:4] == (-0.2, False, False)
            continue
        assert turn[1:4] == (-0.1, True, False)
        env.sample_random_action()  # after the end too
        with pytest.raises(RuntimeError, match="reset"):
            env.step(text)


@one_of_each
def test_the_last_box_counts(env_id: str):
    env = make(env_id)
    env.reset(seed=0)
    action = env.sample_random_action()
    twin = env.fork()
    assert env.step(action) == twin.step(f"Not \\boxed{{that}}, but {action}. \\boxed{{ and so on")


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
    for seed in range(2):
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


@every_game
def test_seeds_differ(env_id: str):
    env = make(env_id)
    games = {env.reset(seed) and str(env.answer) + env.board() for seed in range(12)}
    if stem(env_id) not in ("TowerofHanoi", "Minesweeper"):  # these start from one position
        assert len(games) > 3


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
    ("Game2048", {"board_size": 10**6}, "board_size"),
    ("Game2048", {"target_tile": 128, "max_turns": None}, "give all values"),
    ("Game2048", {"target_tile": 4}, "target_tile"),
    ("Game2048", {"target_tile": 48}, "target_tile"),
    ("Game2048", {"board_size": 1}, "board_size"),
    ("Game2048", {"max_turns": 0}, "max_turns"),
    ("Sokoban", {"dim_room": 6}, "dim_room"),
    ("Sokoban", {"dim_room": (2, 6)}, "dim_room"),
    ("Sokoban", {"num_boxes": 0}, "num_boxes"),
    ("Sokoban", {"dim_room": (7, 7), "num_boxes": None, "max_turns": None}, "give all values"),
    ("Crosswords", {"num_words": 0}, "num_words"),
    ("Crosswords", {"num_words": 51}, "num_words=51"),
    ("WordSearch", {"num_words": 0}, "num_words"),
    ("WordSearch", {"num_words": 21}, "num_words=21"),
    ("WikiGame", {"max_turns": None}, "max_turns"),
    ("WikiGame", {"page_summary_length": 100}, "page_summary_length"),
    ("WikiGame", {"page_summary_length": (3, "pages")}, "page_summary_length"),
    ("WikiGame", {"variant": "both"}, "variant='both'"),
    ("WikiGame", {"backend": "lokal"}, "'lokal'.*'local'"),
    ("WikiGame", {"trawler_kwargs": {"url": "x"}}, "trawler_kwargs"),
]


@pytest.mark.parametrize(("name", "kwargs", "message"), BAD_CALLS)
def test_impossible_sizes_are_refused_with_a_reason(
    name: str, kwargs: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        make(f"game:{name}-v0", **kwargs)


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


def test_missing_sizes_come_from_the_rows_that_fit_the_given_ones():
    known = ((3, 10), (5, 15))
    assert playable_sizes(known, word_length=4, max_turns=9) == ((4, 9),)
    assert playable_sizes(known, word_length=5, max_turns=None) == ((5, 15),)
    assert playable_sizes(known, word_length=None, max_turns=9) == ((3, 9), (5, 9))
    assert playable_sizes(known, word_length=None, max_turns=None) == known
    with pytest.raises(ValueError, match="word_length=4, max_turns=None"):
        playable_sizes(known, word_length=4, max_turns=None)


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
