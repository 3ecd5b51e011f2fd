"""Every game by id: `game:STEM-v0` and its variants, with their sizes.

A size of None is drawn with each instance, and so is a max_turns of None. The plain -v0 is GEM's
original variant; for games that GEM added later it equals -easy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graft.envs.entry import EnvEntry


def variants(
    stem: str, module: str, names: str, sizes: Mapping[str, tuple[Any, ...]]
) -> dict[str, EnvEntry]:
    """One entry per variant: each row of `sizes` has the values of `names`, max_turns last."""
    keys = names.split()
    return {
        f"game:{stem}-v0{suffix}": EnvEntry(
            f"graft_envs.games.{module}:{stem}", dict(zip(keys, row, strict=True)), turns=row[-1]
        )
        for suffix, row in sizes.items()
    }


# fmt: off
GAMES: dict[str, EnvEntry] = {
    **variants("GuessTheNumber", "guess", "min_number max_number max_turns", {
        "": (1, 20, 10), "-easy": (1, 10, 4), "-hard": (1, 50, 7),
        "-hard-no-max-turn": (1, 50, 50), "-random": (None, None, None)}),
    **variants("Mastermind", "mastermind", "code_length num_numbers max_turns", {
        "": (4, 6, 20), "-easy": (2, 6, 10), "-hard": (4, 8, 30), "-random": (None, None, None)}),
    **variants("Minesweeper", "minesweeper", "rows cols num_mines max_turns", {
        "": (8, 8, 10, 100), "-very-easy": (3, 3, 1, 10), "-easy": (5, 5, 5, 25),
        "-hard": (8, 8, 12, 64), "-random": (None, None, None, None)}),
    **variants("Wordle", "wordle", "word_length max_turns", {
        "": (5, 15), "-easy": (3, 15), "-hard": (5, 25), "-random": (None, None)}),
    **variants("Hangman", "hangman", "word_length max_turns", {
        "": (5, 15), "-easy": (3, 10), "-hard": (7, 20), "-random": (None, None)}),
    **variants("FifteenPuzzle", "fifteen", "num_rows max_turns", {
        "": (3, 20), "-easy": (2, 10), "-hard": (4, 50), "-random": (None, None)}),
    **variants("Sudoku", "sudoku", "scale clues max_turns", {
        "": (9, 50, 50), "-easy": (4, 10, 15), "-hard": (9, 50, 50), "-random": (None, None, None)}),
    **variants("TowerofHanoi", "hanoi", "num_disks max_turns", {
        "": (4, 20), "-easy": (3, 10), "-hard": (5, 35), "-random": (None, None)}),
    **variants("Game2048", "twenty48", "target_tile max_turns", {
        "": (64, 50), "-easy": (64, 50), "-hard": (512, 50), "-extreme-hard": (2048, 100),
        "-random": (None, None)}),
    **variants("Sokoban", "sokoban", "dim_room num_boxes max_turns", {
        "": ((6, 6), 2, 20), "-easy": ((6, 6), 2, 20), "-hard": ((8, 8), 4, 50),
        "-random": (None, None, None)}),
    **variants("Crosswords", "crosswords", "hardcore num_words max_turns", {
        "": (False, 3, 30), "-easy": (False, 3, 30), "-hard": (True, 3, 40), "-random": (None, 3, 20)}),
    **variants("WordSearch", "wordsearch", "hardcore num_words max_turns", {
        "": (False, 5, 20), "-easy": (False, 5, 20), "-hard": (True, 5, 20), "-random": (None, 5, 20)}),
    **variants("WikiGame", "wiki.game", "max_turns", {"": (30,), "-easy": (30,), "-hard": (15,)}),
}
# fmt: on
