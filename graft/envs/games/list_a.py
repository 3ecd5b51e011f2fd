"""Eight games and their sizes: `game:STEM-v0-easy`, -hard, -random and the older plain -v0."""

from __future__ import annotations

from collections.abc import Mapping

from graft.envs.catalogue import Entry


def variants(
    stem: str, module: str, names: str, sizes: Mapping[str, tuple[int, ...]]
) -> dict[str, Entry]:
    """One entry per variant: `sizes` gives what `names` list, max_turns last.

    A variant "-random" is always there; all its sizes are None, so each instance draws them.
    """
    keys = names.split()
    rows: dict[str, tuple[int | None, ...]] = {**sizes, "-random": (None,) * len(keys)}
    return {
        f"game:{stem}-v0{suffix}": Entry(
            f"graft.envs.games.{module}:{stem}",
            dict(zip(keys, row, strict=True)),
            turns=row[-1],
        )
        for suffix, row in rows.items()
    }


GAMES_A: dict[str, Entry] = {
    **variants(
        "GuessTheNumber",
        "guess",
        "min_number max_number max_turns",
        {
            "": (1, 20, 10),
            "-easy": (1, 10, 4),
            "-hard": (1, 50, 7),
            "-hard-no-max-turn": (1, 50, 50),
        },
    ),
    **variants(
        "Mastermind",
        "mastermind",
        "code_length num_numbers max_turns",
        {"": (4, 6, 20), "-easy": (2, 6, 10), "-hard": (4, 8, 30)},
    ),
    **variants(
        "Minesweeper",
        "minesweeper",
        "rows cols num_mines max_turns",
        {
            "": (8, 8, 10, 100),
            "-very-easy": (3, 3, 1, 10),
            "-easy": (5, 5, 5, 25),
            "-hard": (8, 8, 12, 64),
        },
    ),
    **variants(
        "Wordle",
        "wordle",
        "word_length max_turns",
        {"": (5, 15), "-easy": (3, 15), "-hard": (5, 25)},
    ),
    **variants(
        "Hangman",
        "hangman",
        "word_length max_turns",
        {"": (5, 15), "-easy": (3, 10), "-hard": (7, 20)},
    ),
    **variants(
        "FifteenPuzzle",
        "fifteen",
        "num_rows max_turns",
        {"": (3, 20), "-easy": (2, 10), "-hard": (4, 50)},
    ),
    **variants(
        "Sudoku",
        "sudoku",
        "scale clues max_turns",
        {"": (9, 50, 50), "-easy": (4, 10, 15), "-hard": (9, 50, 50)},
    ),
    **variants(
        "TowerofHanoi",
        "hanoi",
        "num_disks max_turns",
        {"": (4, 20), "-easy": (3, 10), "-hard": (5, 35)},
    ),
}
