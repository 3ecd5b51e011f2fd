"""The same positions and actions in GEM 0.1.0 and here: flags agree exactly, rewards to the last bits
(ours add up to 1.0, so the shares of a win may differ from each other by one of them).

Known differences, each tested: a word of the word search pays once (GEM pays it again when its ends
are named the other way round); the last turn keeps its feedback (GEM's is replaced by a notice).
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from graft.envs import make
from graft_envs.games.twenty48 import exponent
from graft_envs.games.word_grid import PlacedWord, draw
from graft_envs.games.wordsearch import format_ends

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]
gem = pytest.importorskip("gem")

WORDS = ["apple", "river", "house", "stone", "green", "lamp", "cat", "window", "garden", "tea"]


def box(action: object) -> str:
    return f"\\boxed{{{action}}}"


def cells_of(board: list[list[int]]) -> str:
    return "".join(
        "." if not tile else chr(95 + tile.bit_length()) for row in board for tile in row
    )


@pytest.mark.parametrize("variant", ["easy", "hard", "random"])
def test_2048_pays_and_ends_like_gem(variant: str):
    theirs, ours = (m.make(f"game:Game2048-v0-{variant}") for m in (gem, make_module()))
    for seed in range(6):
        theirs.reset(seed=seed)
        ours.reset(seed=seed)
        ours.cells = cells_of(theirs.board)
        ours.start = ours.best = exponent(max(ours.cells))
        ours.target_tile, ours.max_turns = theirs.target_tile, theirs.max_turns
        ours.add_tile = lambda: setattr(ours, "cells", cells_of(theirs.board))  # their dice
        rng = random.Random(seed)
        over = False
        while not over:
            action = box(rng.choice(["left", "down", "Right", "UP", "left", "down"]))
            if rng.random() < 0.005:
                action = "none"
            before = theirs.step(action)
            after = ours.step(action)
            assert after[1:4] == pytest.approx(before[1:4], abs=1e-12)
            assert ours.cells == cells_of(theirs.board)
            over = before[2] or before[3]


def make_module() -> Any:
    import graft

    return graft


def test_sokoban_pays_and_ends_like_gem():
    theirs, ours = gem.make("game:Sokoban-v0-easy"), make("game:Sokoban-v0-easy")
    signs = {0: "#", 1: "_", 2: "O", 3: "√", 4: "X", 5: "P"}
    for seed in range(6):
        theirs.reset(seed=seed)
        ours.reset(seed=seed)
        ours.room = "".join(signs[int(c)] for c in theirs.room_fixed.reshape(-1))
        ours.cells = [signs[int(c)] for c in theirs.room_state.reshape(-1)]
        ours.player = ours.cells.index("P")
        rng = random.Random(seed)
        over = False
        while not over:
            action = box(rng.choice(["up", "down", "left", "right"]))
            if rng.random() < 0.01:
                action = "\\boxed{jump}"
            before, after = theirs.step(action), ours.step(action)
            assert after[1:4] == pytest.approx(before[1:4], abs=1e-12)
            assert ours.cells == [signs[int(c)] for c in theirs.room_state.reshape(-1)]
            over = before[2] or before[3]


def test_gem_solves_our_levels_with_our_solutions():
    import numpy as np

    theirs, ours = gem.make("game:Sokoban-v0-easy"), make("game:Sokoban-v0-easy")
    codes = {"#": 0, "_": 1, "O": 2, "X": 4, "P": 5}
    for seed in range(10):
        ours.reset(seed=seed)
        theirs.turn_count = 0
        theirs.room_fixed = np.array([codes[c] for c in ours.room]).reshape(6, 6)
        theirs.room_state = np.array([codes[c] for c in ours.cells]).reshape(6, 6)
        theirs.player_position = np.array(divmod(ours.player, 6))
        for direction in ours.answer:
            last = theirs.step(box(direction))
        assert last[1:4] == (1.0, True, False)


@pytest.mark.parametrize("variant", ["easy", "hard"])
def test_crosswords_pay_and_end_like_gem(variant: str):
    theirs, ours = gem.make(f"game:Crosswords-v0-{variant}"), make(f"game:Crosswords-v0-{variant}")
    for seed in range(6):
        theirs.reset(seed=seed)
        ours.reset(seed=seed)
        ours.solution = ["".join(row).upper() for row in theirs.solution]
        ours.lines = draw(["".join(row) for row in theirs.board])
        ours.num_cells = ours.num_open = theirs.total_letter_cells
        side = len(ours.solution)
        rng = random.Random(seed)
        right = [
            (r, c, ours.solution[r][c])
            for r in range(side)
            for c in range(side)
            if ours.solution[r][c] != "."
        ]
        rng.shuffle(right)
        over = False
        while not over:
            action = (rng.randrange(side + 2), rng.randrange(side + 2), rng.choice("AEiox"))
            if right and rng.random() < 0.8:
                action = right.pop()
            text = box("{} {} {}".format(*action)) if rng.random() > 0.01 else "?"
            before, after = theirs.step(text), ours.step(text)
            assert after[1:4] == pytest.approx(before[1:4], abs=1e-12)
            over = before[2] or before[3]


@pytest.fixture
def gem_word_search(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("gem.envs.game_env.word_search")

    class Corpus:
        @staticmethod
        def words(name: str) -> list[str]:
            return WORDS

    monkeypatch.setattr(module, "words", Corpus)
    return gem.make("game:WordSearch-v0-easy")


def load_word_search(theirs: Any, seed: int) -> Any:
    theirs.reset(seed=seed)
    ours = make("game:WordSearch-v0-easy")
    ours.reset(seed=seed)
    ours.side = len(theirs.game_board)
    ours.lines = draw(["".join(row) for row in theirs.game_board])
    ours.hidden = {
        format_ends(PlacedWord(word, *at)): word for word, at in theirs.placed_words.items()
    }
    return ours


def test_word_search_pays_and_ends_like_gem(gem_word_search: Any):
    theirs = gem_word_search
    for seed in range(6):
        ours = load_word_search(theirs, seed)
        rng = random.Random(seed)
        words = list(ours.hidden)
        over = False
        while not over:
            guess = " ".join(str(rng.randrange(ours.side + 1)) for _ in range(4))
            if words and rng.random() < 0.4:
                guess = words.pop()
            before, after = theirs.step(box(guess)), ours.step(box(guess))
            assert after[1:4] == pytest.approx(before[1:4], abs=1e-12)
            over = before[2] or before[3]


def test_only_gem_pays_a_word_twice(gem_word_search: Any):
    ours = load_word_search(gem_word_search, 0)
    forward = next(iter(ours.hidden))
    r1, c1, r2, c2 = forward.split()
    backward = f"{r2} {c2} {r1} {c1}"
    share = 1 / len(ours.hidden)
    assert [gem_word_search.step(box(way))[1] for way in (forward, backward)] == [share, share]
    assert [ours.step(box(way)).reward for way in (forward, backward)] == [share, 0.0]
