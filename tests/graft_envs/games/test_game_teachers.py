"""Teachers of the games: legal moves, true answers, wins where a program can win, and in bounded time."""

from __future__ import annotations

import json
import random
import time
from itertools import combinations
from typing import Any

import pytest

from graft.envs import make
from graft.envs.base import Trace
from graft.types import Author, Turn
from graft_envs.games import fifteen, minesweeper, words
from graft_envs.games.base import Game
from graft_envs.games.mastermind import pegs
from graft_envs.games.solvers import sokoban as sokoban_solver
from graft_envs.games.solvers.fifteen import detours, line_by_line, search
from graft_envs.games.solvers.minesweeper import risks
from graft_envs.games.sudoku_grids import is_forced, missing_digits, shape
from graft_envs.games.twenty48 import line_value
from graft_envs.games.variants import GAMES
from tests.envs.env_kit import play, teacher

SEEDS = 5
WON = {
    # of 5 games; the other teachers win all of them
    **dict.fromkeys(["game:Minesweeper-v0", "game:Minesweeper-v0-hard"], 3),
    **dict.fromkeys(["game:FifteenPuzzle-v0", "game:FifteenPuzzle-v0-random"], 2),
    **dict.fromkeys(["game:Game2048-v0-hard", "game:Game2048-v0-extreme-hard"], 0),
    "game:Minesweeper-v0-random": 4,
    "game:Hangman-v0-easy": 4,
    "game:FifteenPuzzle-v0-hard": 3,  # 4 where the search has time
}
DISTINCT = [name for n, name in enumerate(GAMES) if GAMES[name] not in [*GAMES.values()][:n]]
"""Variants that differ in more than their names."""
UP, DOWN, LEFT, RIGHT = "up", "down", "left", "right"


def replay(env: Any, trace: Trace) -> list[Turn]:
    """Step through a demonstration: every answer is as demonstrated, no move is refused."""
    turns: list[Turn] = []
    for number, (author, text) in enumerate(trace):
        assert author is (Author.ENV if number % 2 else Author.POLICY)
        if author is Author.POLICY:
            turns.append(env.step(text))
            assert "invalid" not in turns[-1].observation
            assert "required form" not in turns[-1].observation
        else:
            assert text == turns[-1].observation
    assert trace[-1][0] is Author.POLICY
    return turns


def is_won(turns: list[Turn]) -> bool:
    """A win pays 1.0 in all; the wiki game costs 0.05 for every click before the last."""
    costs = sum(turn.reward for turn in turns if turn.reward < 0)
    total = sum(turn.reward for turn in turns)
    return turns[-1].terminated and not turns[-1].truncated and total - costs == 1.0


@pytest.mark.parametrize("env_id", DISTINCT)
def test_a_teacher_plays_by_the_rules_to_the_end_and_wins(env_id: str):
    env = make(env_id)
    won = 0
    for seed in range(SEEDS):
        env.reset(seed)
        before = json.dumps(env.get_state())
        trace = env.demonstrate(random.Random(seed))
        assert json.dumps(env.get_state()) == before
        if not seed:
            assert env.demonstrate(random.Random(seed)) == trace
            assert teacher(env, seed) == [text for _, text in trace[::2]]
        turns = replay(env, trace)
        assert turns[-1].is_over
        won += is_won(turns)
    assert won >= WON.get(env_id, SEEDS)


def test_a_teacher_continues_from_the_current_position():
    for env_id in ("GuessTheNumber", "TowerofHanoi", "Sudoku", "WordSearch", "Crosswords"):
        env = make(f"game:{env_id}-v0")
        env.reset(2)
        play(env, (teacher(env) or [])[:2])
        turns = replay(env, env.demonstrate(random.Random(0)))
        assert turns[-1].terminated
        assert not turns[-1].truncated


def test_a_state_read_from_json_has_its_teacher():
    for env_id in DISTINCT[::2]:
        env, other = make(env_id), make(env_id)
        env.reset(1)
        other.set_state(json.loads(json.dumps(env.get_state())))
        assert other.demonstrate(random.Random(5)) == env.demonstrate(random.Random(5))


def test_without_a_game_there_is_nothing_to_demonstrate():
    env = make("game:Sudoku-v0")
    with pytest.raises(RuntimeError, match="call reset"):
        env.demonstrate(random.Random(0))
    env.reset(0)
    env.step("nothing")
    with pytest.raises(RuntimeError, match="call reset"):
        env.demonstrate(random.Random(0))


def test_a_game_without_a_teacher_is_an_error_that_names_the_method():
    class Bare(Game):
        pattern = fifteen.FifteenPuzzle.pattern
        draw_instance = rules = board = lambda self: ""  # pyright: ignore

    env = Bare(max_turns=3)
    env.reset(0)
    with pytest.raises(NotImplementedError, match=r"Bare has no teacher: write teacher_moves\(\)"):
        env.demonstrate(random.Random(0))


SECRETS = {
    "GuessTheNumber": [1, 13],
    "Mastermind": [[1, 2, 3, 4], [6, 5, 4, 3]],
    "Wordle": [words.basic(5)[0].upper(), words.basic(5)[-1].upper()],
    "Hangman": [words.basic(5)[0].upper(), words.basic(5)[-1].upper()],
}


@pytest.mark.parametrize("name", SECRETS)
def test_the_first_guess_does_not_depend_on_what_is_hidden(name: str):
    first = set[str]()
    for secret in SECRETS[name]:
        env = make(f"game:{name}-v0")
        env.reset(0)
        env.answer = secret
        first.add(env.demonstrate(random.Random(3))[0][1])
    assert len(first) == 1


def test_halving_1_to_10_finds_each_number_within_four_guesses():
    for hidden in range(1, 11):
        for luck in range(4):
            env = make("game:GuessTheNumber-v0-easy")
            env.reset(0)
            env.answer = hidden
            assert is_won(replay(env, env.demonstrate(random.Random(luck))))


def test_every_guess_of_mastermind_agrees_with_all_answers_before_it():
    env = make("game:Mastermind-v0-hard", duplicate_numbers=True)
    for seed in range(5):
        env.reset(seed)
        moves = [text.removeprefix("\\boxed{")[:-1].split() for text in teacher(env, seed) or []]
        guesses = [[int(word) for word in move] for move in moves]
        for number, guess in enumerate(guesses):
            for earlier in guesses[:number]:
                assert pegs(earlier, guess) == pegs(earlier, env.answer)


def test_mastermind_with_too_many_codes_has_no_teacher():
    env = make("game:Mastermind-v0", code_length=8, num_numbers=10)
    env.reset(0)
    with pytest.raises(NotImplementedError, match=r"8 of 10 numbers.*more than 100000"):
        env.demonstrate(random.Random(0))


def test_two_disks_take_three_moves_and_any_position_the_least():
    env = make("game:TowerofHanoi-v0", num_disks=2)
    env.reset(0)
    assert teacher(env) == ["\\boxed{A B}", "\\boxed{A C}", "\\boxed{B C}"]
    env = make("game:TowerofHanoi-v0", num_disks=2)
    env.reset(0)
    env.step("\\boxed{A C}")  # the small one is in the way of the large one
    assert teacher(env) == ["\\boxed{C B}", "\\boxed{A C}", "\\boxed{B C}"]


NEXT_TO = {n: [list(around.values()) for around in fifteen.sources(n)] for n in (2, 3, 4)}


def test_two_moves_from_order_take_two_moves():
    env = make("game:FifteenPuzzle-v0")
    env.reset(0)
    env.tiles = [1, 2, 3, 4, 0, 5, 7, 8, 6]
    assert teacher(env) == ["\\boxed{left}", "\\boxed{up}"]


def test_the_search_finds_shortest_ways_as_going_through_all_boards_does():
    """From the ordered 3x3 board backwards, 12 moves deep: every board with its distance."""
    start = tuple(fifteen.goal(3))
    far, edge = {start: 0}, [start]
    for board in edge:
        if far[board] == 12:
            break
        gap = board.index(0)
        for place in NEXT_TO[3][gap]:
            moved = list(board)
            moved[gap], moved[place] = moved[place], 0
            if tuple(moved) not in far:
                far[tuple(moved)] = far[board] + 1
                edge.append(tuple(moved))
    for board in random.Random(0).sample(edge, 80):
        way = search(board, NEXT_TO[3], 1.0)
        assert way is not None
        assert len(way) == far[board]
        if far[board]:
            assert search(board, NEXT_TO[3], 1.0, max_moves=far[board] - 1) is None


def test_a_tile_that_must_step_aside_costs_two_moves():
    assert detours(bytes([3, 1, 2]), range(1, 4)) == 2
    assert detours(bytes([3, 2, 1]), range(1, 4)) == 4
    assert detours(bytes([1, 0, 3]), range(1, 4)) == 0
    assert detours(bytes([7, 4, 1]), range(1, 10, 3)) == 4  # the first column of 3 x 3


def test_line_by_line_orders_any_board():
    for seed in range(4):
        env = make("game:FifteenPuzzle-v0", num_rows=4, init_algo="pure_random")
        env.reset(seed)
        board = env.tiles
        for place in line_by_line(board, NEXT_TO[4]):
            gap = board.index(0)
            assert place in NEXT_TO[4][gap]
            board[gap], board[place] = board[place], 0
        assert board == fifteen.goal(4)


def test_a_satisfied_digit_makes_its_other_cells_safe():
    around = minesweeper.neighbours(3, 3)
    assert risks([*"..1", *"111", *"000"], around, 1) == {0: 0.0, 1: 1.0}
    # one mine somewhere around the 1 in the middle of a row, and none left for the other cells
    assert risks([*".1.", *"..."], minesweeper.neighbours(2, 3), 1) == dict.fromkeys(
        [0, 2, 3, 4, 5], 0.2
    )
    # two mines in four cells, one of them beside the 1: 1 of the 2 cells there, 1 of the 2 beyond
    assert risks([*".1..."], minesweeper.neighbours(1, 5), 2) == dict.fromkeys([0, 2, 3, 4], 0.5)


def test_chances_are_those_of_going_through_all_placements():
    rng = random.Random(0)
    for _ in range(60):
        rows, cols = rng.choice([(3, 4), (4, 4), (2, 6)])
        around, mines = minesweeper.neighbours(rows, cols), rng.randint(1, 5)
        true = set(rng.sample(range(rows * cols), mines))
        cells = [
            str(len(true.intersection(around[cell])))
            if cell not in true and rng.random() < 0.4
            else "."
            for cell in range(rows * cols)
        ]
        hidden = [cell for cell, shown in enumerate(cells) if shown == "."]
        digits = [(around[cell], int(shown)) for cell, shown in enumerate(cells) if shown != "."]
        fitting = [
            set(placed)
            for placed in combinations(hidden, mines)
            if all(len(set(placed).intersection(others)) == digit for others, digit in digits)
        ]
        chances = risks(cells, around, mines)
        for cell, chance in chances.items():
            want = sum(cell in placed for placed in fitting) / len(fitting)
            assert chance == pytest.approx(want, abs=1e-12)
        if 0.0 not in chances.values():
            assert sorted(chances) == hidden


def test_strict_flags_are_set_before_the_last_cell_is_opened():
    env = make("game:Minesweeper-v0", strict_flags=True)
    won = 0
    for seed in range(10):
        env.reset(seed)
        turns = replay(env, env.demonstrate(random.Random(seed)))
        won += is_won(turns)
    assert won >= 5


STEPS = {UP: -6, DOWN: 6, LEFT: -1, RIGHT: 1}


def test_a_walk_around_the_box_and_two_pushes_are_four_steps():
    floor = {7, 8, 9, 10, 13, 14, 15, 16}  # two rows of four cells in a room of 6 columns
    assert sokoban_solver.solve(floor, {16}, [14], 8, STEPS) == [LEFT, DOWN, RIGHT, RIGHT]
    assert sokoban_solver.solve(floor, {16}, [13], 8, STEPS) is None  # a corner holds its box
    assert sokoban_solver.least_pushes(floor, {16}, STEPS) == {16: 0, 15: 1, 14: 2}


def test_the_teacher_of_sokoban_is_never_slower_than_the_levels_own_solution():
    env = make("game:Sokoban-v0-hard")
    for seed in range(4):
        _, info = env.reset(seed)
        assert len(teacher(env) or []) <= len(info["answer"])


def test_a_sokoban_position_that_is_lost_has_no_teacher():
    env = make("game:Sokoban-v0", dim_room=(5, 5), num_boxes=1)
    env.reset(0)
    env.room, env.player, env.turns = "######___##_O_##___######", 18, 7
    env.cells = [*"######X__##_O_##__P######"]
    with pytest.raises(
        NotImplementedError, match=r"after turn 7; call demonstrate\(\) at the start"
    ):
        env.demonstrate(random.Random(0))


def test_sudoku_goes_on_at_a_cell_whose_digit_follows():
    env = make("game:Sudoku-v0-easy")
    of = shape(4)
    for seed in range(5):
        env.reset(seed)
        for action in teacher(env, seed) or []:
            row, col, digit = (int(word) for word in action.removeprefix("\\boxed{")[:-1].split())
            grid = [0 if shown == "." else 1 << int(shown) for shown in env.cells]
            assert is_forced(of, grid, missing_digits(of, grid), 4 * row + col - 5, 1 << digit)
            env.step(action)


def test_a_line_of_2048_is_worth_its_room_its_pairs_and_its_order():
    assert line_value("aab.") == 3 + 2 - 1
    assert line_value("....") == 12
    assert line_value("dcba") == 0
    assert line_value("dada") == -3


def test_2048_is_played_towards_a_target_out_of_reach():
    env = make("game:Game2048-v0-hard")
    rewards = 0.0
    for seed in range(5):
        env.reset(seed)
        rewards += sum(turn.reward for turn in replay(env, env.demonstrate(random.Random(seed))))
    assert rewards / 5 > 0.5  # 64 of 512 from a 2: five doublings of eight are 0.625


def test_crosswords_are_filled_word_by_word():
    env = make("game:Crosswords-v0")
    env.reset(0)
    written = [action.removeprefix("\\boxed{")[:-1].split()[2] for action in teacher(env) or []]
    assert any("".join(written).startswith(word) for word in env.answer)


def test_the_wiki_teacher_takes_a_shortest_way_in_every_variant():
    for variant in ("noregrets", "eidetic", "oneback", "freenav"):
        env = make("game:WikiGame-v0", variant=variant)
        for seed in range(10):
            _, info = env.reset(seed)
            actions = teacher(env) or []
            assert len(actions) == len(info["answer"]) - 1
            assert play(env, actions)[-1].reward == 1.0


def test_a_served_wiki_has_no_teacher():
    env = make("game:WikiGame-v0")
    env.reset(0)
    env.wiki = object()
    with pytest.raises(NotImplementedError, match="backend='local'"):
        env.demonstrate(random.Random(0))


LARGE: list[tuple[str, dict[str, Any]]] = [
    ("FifteenPuzzle", {"num_rows": 8, "init_algo": "pure_random", "max_turns": 5000}),
    ("Minesweeper", {"rows": 16, "cols": 30, "num_mines": 99, "max_turns": 480}),
    ("Game2048", {"board_size": 10, "max_turns": 60, "target_tile": 1024}),
    ("Sokoban", {"dim_room": (12, 12), "num_boxes": 8, "max_turns": 100}),
    (
        "Mastermind",
        {"code_length": 5, "num_numbers": 9, "max_turns": 30, "duplicate_numbers": True},
    ),
    ("Hangman", {"word_length": 8, "hardcore": True, "max_turns": 20}),
    ("Wordle", {"word_length": 10, "max_turns": 20, "only_real_words": True}),
    ("TowerofHanoi", {"num_disks": 100, "max_turns": 200}),
    ("Crosswords", {"num_words": 8, "max_turns": 90}),
    ("WordSearch", {"num_words": 12, "max_turns": 20, "hardcore": True}),
    ("GuessTheNumber", {"min_number": 0, "max_number": 10**9 - 1, "max_turns": 40}),
]


@pytest.mark.parametrize(("name", "sizes"), LARGE)
def test_large_games_are_taught_in_bounded_time(name: str, sizes: dict[str, Any]):
    env = make(f"game:{name}-v0", **sizes)
    env.reset(1)
    start = time.process_time()
    trace = env.demonstrate(random.Random(1))
    assert time.process_time() - start < 6
    assert replay(env, trace)[-1].is_over
