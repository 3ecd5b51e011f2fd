r"""The same hidden start and the same actions give the same rewards and ends as gem-llm 0.1.0.

Each trace starts the original game, copies its hidden state into ours by `set_state`, and steps both
with one list of good, random, illegal and malformed actions.

Where ours differs on purpose, and the traces therefore stay away or look for the difference:
- GuessTheNumber: 0 is out of range (invalid), there it is a format error.
- Minesweeper: clearing the board wins; there all mines must be flagged too. `strict_flags=True`
  behaves like the original and is what is compared.
- Hangman: uncovering the last letter wins and pays the missing half; there the game goes on.
- TowerofHanoi: moving a disk onto its own peg is invalid, there it is a move that changes nothing
  (no difference in reward).
- Blanks around and between the parts of an action, and upper-case directions, are accepted here.
- The text is our own, and the last turn keeps its feedback.
- Rewards agree to rounding: ours add up to exactly 1.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from graft.envs import make
from graft_envs.games import words
from graft_envs.games.fifteen import MOVES, sources

pytestmark = pytest.mark.peer

MALFORMED = ["", "7", "\\boxed{}", "\\boxed{!}", "boxed{A C}", "\\boxed{1 2", "\\boxed{?? 1}"]
ILLEGAL = {
    "GuessTheNumber": ["\\boxed{99}", "\\boxed{1}", "\\boxed{51}", "\\boxed{100000}"],
    "Mastermind": ["\\boxed{1}", "\\boxed{1 2 3 9}", "\\boxed{0 1}", "\\boxed{1 2 3 4 5}"],
    "Minesweeper": ["\\boxed{reveal 9 9}", "\\boxed{dig 1 1}", "\\boxed{reveal 0 0}"],
    "Wordle": ["\\boxed{A}", "\\boxed{ABOUT}", "\\boxed{ACT}", "\\boxed{LETTERS}"],
    "Hangman": ["\\boxed{E}", "\\boxed{AB}", "\\boxed{LETTERSS}", "\\boxed{ABOUT}"],
    "FifteenPuzzle": [f"\\boxed{{{word}}}" for word in MOVES],
    "Sudoku": ["\\boxed{0 1 1}", "\\boxed{1 1 1}", "\\boxed{2 2 10}", "\\boxed{4 4 4}"],
    "TowerofHanoi": ["\\boxed{B C}", "\\boxed{B A}", "\\boxed{A C}", "\\boxed{C,A}"],
}


class BundledWords:
    """Stands in for the nltk corpus, which would have to be downloaded."""

    def words(self, name: str) -> list[str]:
        return list(words.basic() if name == "en-basic" else words.full())


@pytest.fixture(scope="module")
def gem_make() -> Callable[[str], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gem = pytest.importorskip("gem")
        from gem.envs.game_env import hangman, wordle

        patch = pytest.MonkeyPatch()
        for module in (hangman, wordle):
            patch.setattr(module, "words", BundledWords())
            patch.setattr(module.nltk, "download", lambda *_: True)

    def build(env_id: str) -> Any:
        return gem.make(env_id)

    return build


def flat(grid: list[list[Any]]) -> list[Any]:
    return [cell for row in grid for cell in row]


def hidden_state(name: str, theirs: Any) -> dict[str, Any]:
    """The original's hidden state in the names of ours."""
    if name == "GuessTheNumber":
        limits = {"low": theirs.min_number, "high": theirs.max_number}
        return {"answer": theirs.game_number, **limits}
    if name == "Mastermind":
        sizes = {"code_length": theirs.code_length, "num_numbers": theirs.num_numbers}
        return {"answer": theirs.game_code, **sizes}
    if name == "Minesweeper":
        hidden = ["."] * (theirs.rows * theirs.cols)
        sizes = {"rows": theirs.rows, "cols": theirs.cols, "num_mines": theirs.num_mines}
        return {"field": [], "cells": hidden, **sizes}
    if name == "Wordle":
        return {"answer": theirs.secret_word, "word_length": theirs.word_length}
    if name == "Hangman":
        length = theirs.word_length
        return {"answer": theirs.secret_word, "word_length": length, "shown": "_" * length}
    if name == "FifteenPuzzle":
        return {"tiles": [tile or 0 for tile in flat(theirs.board)], "num_rows": theirs.num_rows}
    if name == "Sudoku":
        return {
            "scale": theirs.scale,
            "answer": ["".join(map(str, row)) for row in theirs.full_grid],
            "cells": ["." if not digit else str(digit) for digit in flat(theirs.board)],
            "num_holes": theirs.init_num_empty,
        }
    return {"pegs": theirs.board, "num_disks": theirs.num_disks}


def good(name: str, ours: Any, rng: random.Random) -> str:
    """A step towards the win, taken from the hidden state."""
    if name == "GuessTheNumber":
        return f"\\boxed{{{ours.answer}}}"
    if name == "Mastermind":
        code = [n if rng.random() < 0.8 else 1 for n in ours.answer]
        return f"\\boxed{{{' '.join(map(str, code))}}}"
    if name == "Minesweeper" and ours.field:
        mines = [at for at, n in enumerate(ours.field) if n < 0 and ours.cells[at] == "."]
        safe = [at for at, n in enumerate(ours.field) if n >= 0 and ours.cells[at] == "."]
        verb, cells = ("flag", mines) if mines else ("reveal", safe)
        if cells:
            row, col = divmod(rng.choice(cells), ours.cols)
            return f"\\boxed{{{verb} {row} {col}}}"
    if name == "Wordle":
        word = [x if rng.random() < 0.8 else "E" for x in ours.answer]
        return f"\\boxed{{{''.join(word)}}}"
    if name == "Hangman":
        return f"\\boxed{{{rng.choice([*ours.answer, ours.answer])}}}"
    if name == "Sudoku":
        row, col = divmod(rng.choice([i for i, x in enumerate(ours.cells) if x == "."]), ours.scale)
        return f"\\boxed{{{row + 1} {col + 1} {ours.answer[row][col]}}}"
    if name == "TowerofHanoi":
        return f"\\boxed{{{(hanoi_line(ours.num_disks) + ['A B'] * 50)[ours.turns]}}}"
    if name == "FifteenPuzzle" and ours.num_rows == 2:
        gap = ours.tiles.index(0)  # round and round: half of the boards are on this way
        ahead = {0: 1, 1: 3, 3: 2, 2: 0}[gap]
        return next(f"\\boxed{{{word}}}" for word in MOVES if sources(2)[gap].get(word) == ahead)
    return ours.sample_random_action()


def hanoi_line(disks: int, source: str = "A", target: str = "C", spare: str = "B") -> list[str]:
    if disks == 0:
        return []
    before = hanoi_line(disks - 1, source, spare, target)
    return [*before, f"{source} {target}", *hanoi_line(disks - 1, spare, target, source)]


def one_action(name: str, ours: Any, rng: random.Random, skill: float, slips: float) -> str:
    if rng.random() < slips:
        return rng.choice(MALFORMED)
    if rng.random() < skill:
        return f"Let me think. {good(name, ours, rng)} is my move."
    return rng.choice([ours.sample_random_action(), rng.choice(ILLEGAL[name])])


IDS = [
    f"game:{name}-v0-{variant}"
    for name in ILLEGAL
    for variant in ("easy", "hard", "random")
    # raises in gem-llm 0.1.0; generating a hard grid there takes 0.1 s, so once will do
    if (name, variant) not in (("FifteenPuzzle", "random"), ("Sudoku", "random"))
]


@pytest.mark.parametrize("env_id", IDS)
def test_rewards_and_ends_are_those_of_the_original(env_id: str, gem_make: Callable[[str], Any]):
    name = env_id.removeprefix("game:").partition("-")[0]
    strict: dict[str, Any] = {"strict_flags": True} if name == "Minesweeper" else {}
    ends = set[str]()
    theirs = gem_make(env_id)
    for seed in range(3 if env_id == "game:Sudoku-v0-hard" else 12):
        rng = random.Random(seed)
        theirs.reset(seed=seed)
        ours = make(env_id, **strict)
        ours.reset(seed=seed)
        ours.set_state(
            {**ours.get_state(), "max_turns": theirs.max_turns, **hidden_state(name, theirs)}
        )
        skill, slips = (0.0, 0.5, 1.0)[seed % 3], (0.0, 0.2)[seed % 2]
        while not ours.is_over:
            action = one_action(name, ours, rng, skill, slips)
            _, reward, terminated, truncated, _ = theirs.step(action)
            if name == "Minesweeper" and not ours.field and not theirs.first_reveal:
                ours.field = flat(theirs.grid)
            turn = ours.step(action)
            if name == "Hangman" and turn.terminated and not terminated:
                # the documented difference: the board is full, ours pays the other half
                assert "_" not in theirs.board
                assert turn.reward == pytest.approx(reward + 0.5)
                ends.add("full board")
                break
            assert turn.reward == pytest.approx(reward, abs=1e-12)
            assert (turn.terminated, turn.truncated) == (terminated, truncated)
            if turn.is_over:
                ends.add("format" if reward < 0 else "limit" if truncated else "end")
    assert "format" in ends
    assert "end" in ends or env_id == "game:FifteenPuzzle-v0-hard"  # too hard for these players


def test_the_documented_differences_are_there(gem_make: Callable[[str], Any]):
    theirs, ours = gem_make("game:GuessTheNumber-v0-hard"), make("game:GuessTheNumber-v0-hard")
    ours.reset(seed=0)
    assert theirs.step("\\boxed{0}")[1] == -0.1
    assert ours.step("\\boxed{0}").reward == 0.0

    theirs, ours = gem_make("game:TowerofHanoi-v0-easy"), make("game:TowerofHanoi-v0-easy")
    ours.reset(seed=0)
    assert "moved disk" in theirs.step("\\boxed{A A}")[0]
    assert "invalid" in ours.step("\\boxed{A A}").observation

    theirs, ours = gem_make("game:FifteenPuzzle-v0-easy"), make("game:FifteenPuzzle-v0-easy")
    ours.reset(seed=0)
    assert theirs.step("\\boxed{UP}")[1] == -0.1
    assert ours.step("\\boxed{UP}").reward >= 0.0
