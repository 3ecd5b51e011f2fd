"""Where words go on a grid, crosswords and word search."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.envs import make
from graft_envs.games.crosswords import CLUES, Crosswords, clue_list
from graft_envs.games.word_grid import (
    ACROSS,
    DOWN,
    PlacedWord,
    count_letters,
    draw,
    get,
    lay_out,
    put,
)
from graft_envs.games.wordsearch import candidates, format_ends

WORDS = ("CAT", "TEA", "ANT", "LAMP", "PLUM", "STONE", "RIVER", "GARDEN", "CASTLE")


def letters_of(env: Crosswords) -> list[tuple[int, int, str]]:
    return [
        (row, col, letter)
        for row, text in enumerate(env.solution)
        for col, letter in enumerate(text)
        if letter != "."
    ]


@given(seed=st.integers(0, 10**6), num_words=st.integers(1, 6))
def test_exactly_that_many_different_words_lie_on_the_grid_letter_for_letter(
    seed: int, num_words: int
):
    rows, placed = lay_out(random.Random(seed), WORDS, num_words)
    assert len({place.word for place in placed}) == num_words
    covered = set()
    for place in placed:
        assert "".join(rows[row][col] for row, col in place.cells()) == place.word
        covered |= set(place.cells())
    assert count_letters(rows) == len(covered)


@given(seed=st.integers(0, 10**6))
def test_every_run_of_letters_is_a_placed_word(seed: int):
    rows, placed = lay_out(random.Random(seed), WORDS, 4)
    columns = ["".join(column) for column in zip(*rows, strict=True)]
    runs = re.findall(r"[A-Z]{2,}", " ".join([*rows, *columns]))
    assert sorted(runs) == sorted(place.word for place in placed)


def test_the_side_is_one_and_a_half_times_the_longest_word():
    rows, placed = lay_out(random.Random(0), ("BUTTERFLY", "CAT"), 2)
    assert len(rows) == len(rows[0]) == round(1.5 * 9)
    assert placed[0].word == "BUTTERFLY"


def test_words_cross_where_they_can():
    crossed = 0
    for seed in range(50):
        rows, _ = lay_out(random.Random(seed), ("STONE", "TEA"), 2)
        crossed += count_letters(rows) == 7
    assert crossed == 50


def test_more_words_than_fit_is_an_error():
    with pytest.raises(ValueError, match="num_words=3: no grid was found that has at most 4"):
        lay_out(random.Random(0), WORDS, 3, 4)
    with pytest.raises(ValueError, match="num_words=10"):
        lay_out(random.Random(0), WORDS, 10)


def test_drawn_cells_can_be_read_and_overwritten():
    lines = draw(["AB", "C."])
    assert lines == ["    C00 C01", "R00  A   B ", "R01  C   . "]
    assert get(lines, 1, 0) == "C"
    put(lines, 0, 1, "[B]")
    put(lines, 1, 1, "x")
    assert lines[1:] == ["R00  A  [B]", "R01  C   x "]


def test_cells_and_ends_of_a_word():
    assert PlacedWord("CAT", 2, 5, DOWN).cells() == [(2, 5), (3, 5), (4, 5)]
    assert format_ends(PlacedWord("CAT", 2, 5, DOWN)) == "2 5 4 5"
    assert format_ends(PlacedWord("CAT", 2, 5, ACROSS)) == "2 5 2 7"


def test_the_clue_list_is_sound():
    rows = [json.loads(line) for line in CLUES.read_text("utf-8").splitlines()]
    assert len(rows) == 100
    assert sum(row["hardcore"] for row in rows) == 50
    lengths = {len(row["word"]) for row in rows}
    assert (min(lengths), max(lengths)) == (3, 16)
    for row in rows:
        word, clue = row["word"], row["clue"].lower()
        assert word.isascii() and word.isalpha() and word.islower()
        assert word not in clue  # no clue names its word,
        assert "letter" not in clue.replace("letter carved", "").replace("with letters", "")
        assert clue and clue == clue.strip()


def test_the_random_crossword_draws_the_list():
    env = make("game:Crosswords-v0-random")
    kinds = set()
    for seed in range(20):
        env.reset(seed=seed)
        kinds.add(env.hardcore)
        assert set(env.answer) <= set(clue_list(hardcore=bool(env.hardcore)))
        assert env.max_turns == 20
    assert kinds == {True, False}


def test_wrong_letters_and_bad_cells_earn_nothing():
    env = make("game:Crosswords-v0-easy")
    observation, info = env.reset(seed=3)
    assert observation.endswith(info["suffix"])
    row, col, letter = letters_of(env)[0]
    wrong = "Z" if letter != "Z" else "Y"
    black = next(
        (r, c) for r, text in enumerate(env.solution) for c, cell in enumerate(text) if cell == "."
    )
    lines = list(env.lines)
    for action, why in (
        (f"{row} {col} {wrong}", "wrong"),
        (f"{black[0]} {black[1]} A", "black"),
        ("99 0 A", "outside"),
        (f"0 {'9' * 5000} A", "outside"),
    ):
        turn = env.step(f"\\boxed{{{action}}}")
        assert why in turn.observation
        assert turn[1:4] == (0.0, False, False)
        assert env.lines == lines
    share = 1 / len(letters_of(env))
    assert env.step(f"\\boxed{{{row} {col} {letter.lower()}}}").reward == share
    again = env.step(f"\\boxed{{{row} {col} {letter}}}")
    assert "filled" in again.observation and again.reward == 0.0


def test_clues_name_place_length_and_direction():
    env = make("game:Crosswords-v0-easy")
    observation, _ = env.reset(seed=0)
    clues = re.findall(
        r"From row (\d+), column (\d+), (across|down), (\d+) letters: (.+)", observation
    )
    assert len(clues) == 3
    for (row, col, direction, length, clue), word in zip(clues, env.answer, strict=True):
        place = PlacedWord(word, int(row), int(col), direction)
        assert "".join(env.solution[r][c] for r, c in place.cells()) == word
        assert (len(word), clue_list(hardcore=False)[word]) == (int(length), clue)


def test_crossword_settings_are_checked():
    with pytest.raises(ValueError, match="max_turns"):
        Crosswords(num_words=3, max_turns=5).reset(seed=0)


def test_a_word_pays_once_in_whatever_order_its_ends_are_named():
    env = make("game:WordSearch-v0-easy")
    for seed in range(10):
        env.reset(seed=seed)
        for where in list(env.answer.values())[:2]:
            r1, c1, r2, c2 = where.split()
            forward, backward = f"\\boxed{{{where}}}", f"\\boxed{{{r2} {c2} {r1} {c1}}}"
            assert env.step(backward if seed % 2 else forward).reward == 0.2
            for again in (forward, backward):
                turn = env.step(again)
                assert turn.reward == 0.0 and "tried before" in turn.observation
        assert not env.is_over


def test_guesses_off_the_mark_earn_nothing():
    env = make("game:WordSearch-v0-easy")
    env.reset(seed=0)
    where = next(iter(env.answer.values()))
    r1, c1, r2, c2 = map(int, where.split())
    shorter = f"{r1} {c1} {r2} {c2 - 1}" if r1 == r2 else f"{r1} {c1} {r2 - 1} {c2}"
    lines = list(env.lines)
    for action, why in (
        (shorter, "No hidden word"),
        (f"0 0 {env.side} 0", "outside"),
        ("0 0 1 1", "neither"),
        ("0 0 1 1", "tried before"),
    ):
        turn = env.step(f"\\boxed{{{action}}}")
        assert why in turn.observation
        assert turn[1:4] == (0.0, False, False)
    assert env.lines == lines


def test_found_words_are_bracketed_and_the_words_are_not_shown():
    env = make("game:WordSearch-v0-easy")
    observation, info = env.reset(seed=5)
    assert observation.endswith(info["suffix"])
    assert not any(word in observation.replace("GRID", "") for word in env.answer)
    word, where = next(iter(env.answer.items()))
    suffix = env.step(f"\\boxed{{{where}}}").info["suffix"]
    assert suffix.count("[") == len(word)
    assert "Found: 1 of 5" in suffix
    row, col = map(int, where.split()[:2])
    assert f"[{word[0]}]" in suffix.split("\n")[row + 2]
    assert get(env.lines, row, col) == word[0]


def test_word_search_settings_are_checked():
    assert all(3 <= len(word) <= 12 and word.isupper() for word in candidates(hardcore=False))
    assert len(candidates(hardcore=True)) > len(candidates(hardcore=False))
