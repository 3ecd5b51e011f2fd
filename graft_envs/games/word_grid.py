"""Words on a square grid, for crosswords and word search: placing them, and showing the grid."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Cell = tuple[int, int]
ACROSS, DOWN = "across", "down"
BLANK = "."
MAX_GRIDS = 300
MAX_SPARES = 20
"""Words tried in place of ones that fit nowhere, before all words are drawn again."""


class PlacedWord(NamedTuple):
    """A word and its first cell, 0-based."""

    word: str
    row: int
    col: int
    direction: str

    def cells(self) -> list[Cell]:
        """PlacedWord("CAT", 2, 5, "down") -> [(2, 5), (3, 5), (4, 5)]"""
        if self.direction == ACROSS:
            return [(self.row, self.col + i) for i in range(len(self.word))]
        return [(self.row + i, self.col) for i in range(len(self.word))]


WordGrid = tuple[list[str], list[PlacedWord]]
"""Rows of one character per cell, and the words in them."""


def lay_out(
    rng: random.Random, words: Sequence[str], num_words: int, max_cells: int | None = None
) -> WordGrid:
    """Exactly `num_words` of `words` on a grid; together they fill at most `max_cells` cells.

    The side is 1.5 times the longest word, which lies in the middle. Each further word, longest
    first, crosses an earlier one where its letters allow that and takes a free place where not.
    """
    if not 1 <= num_words <= len(words):
        raise ValueError(f"num_words={num_words}: must lie between 1 and {len(words)}")
    # hundreds of draws, and the caller's generator is slow
    fast = random.Random(rng.getrandbits(64))
    crossings = num_words * (num_words - 1) // 2  # the most cells that words can share
    for _ in range(MAX_GRIDS):
        chosen = fast.sample(words, num_words)
        if max_cells is not None and sum(map(len, chosen)) - crossings > max_cells:
            continue
        grid = place_all(fast, words, sorted(chosen, key=len, reverse=True))
        if grid is not None and (max_cells is None or count_letters(grid[0]) <= max_cells):
            return grid
    if max_cells is None:
        raise ValueError(f"num_words={num_words}: no grid was found; take fewer words")
    raise ValueError(
        f"num_words={num_words}: no grid was found that has at most {max_cells} letters, one per "
        "turn; take fewer words or a larger max_turns"
    )


def place_all(rng: random.Random, words: Sequence[str], queue: list[str]) -> WordGrid | None:
    """The words of `queue` on a grid; one that fits nowhere is replaced by another of `words`."""
    side = round(1.5 * len(queue[0]))
    letters: dict[Cell, str] = {}
    taken: dict[str, set[Cell]] = {ACROSS: set(), DOWN: set()}
    placed: list[PlacedWord] = []
    spares = MAX_SPARES
    while queue:
        word = queue.pop(0)
        for place in places(rng, word, side, placed):
            if fits(place, side, letters, taken):
                break
        else:
            spares -= 1
            if spares < 0:
                return None
            queue.insert(0, spare(rng, words, word, [*queue, *(p.word for p in placed)]))
            continue
        placed.append(place)
        letters.update(zip(place.cells(), word, strict=True))
        taken[place.direction].update(place.cells())
    span = range(side)
    return ["".join([letters.get((r, c), BLANK) for c in span]) for r in span], placed


def spare(rng: random.Random, words: Sequence[str], word: str, used: Sequence[str]) -> str:
    """Another word, not longer than `word` if a few draws find one, and not on the grid yet."""
    drawn = [other for other in rng.sample(words, min(20, len(words))) if other not in used]
    return next((other for other in drawn if len(other) <= len(word) and other != word), word)


def places(
    rng: random.Random, word: str, side: int, placed: Sequence[PlacedWord]
) -> Iterator[PlacedWord]:
    """Places for `word`, best first: crossing an earlier word, then anywhere.

    Every list is rotated by a random amount, which is cheaper than a shuffle.
    """
    direction, other_direction = (ACROSS, DOWN) if rng.random() < 0.5 else (DOWN, ACROSS)
    if not placed:
        middle, start = side // 2, (side - len(word)) // 2
        row, col = (middle, start) if direction == ACROSS else (start, middle)
        yield PlacedWord(word, row, col, direction)
        return
    for turned in (direction, other_direction):
        crossings = [
            (row, col - i) if turned == ACROSS else (row - i, col)
            for other in placed
            if other.direction != turned
            for (row, col), letter in zip(other.cells(), other.word, strict=True)
            if letter in word
            for i, own in enumerate(word)
            if own == letter
        ]
        if crossings:
            start = rng.randrange(len(crossings))
            for row, col in crossings[start:] + crossings[:start]:
                yield PlacedWord(word, row, col, turned)
    start = rng.randrange(side * side)
    for at in range(start, start + side * side):
        row, col = divmod(at % (side * side), side)
        yield PlacedWord(word, row, col, direction)


def fits(
    place: PlacedWord, side: int, letters: dict[Cell, str], taken: dict[str, set[Cell]]
) -> bool:
    """Whether the word is inside, agrees with the letters it crosses, and touches nothing else.

    Words that touch would form other words.
    """
    down, right = (0, 1) if place.direction == ACROSS else (1, 0)
    row, col, length = place.row, place.col, len(place.word)
    last_row, last_col = row + down * (length - 1), col + right * (length - 1)
    if row < 0 or col < 0 or last_row >= side or last_col >= side:
        return False
    if (row - down, col - right) in letters or (last_row + down, last_col + right) in letters:
        return False
    own_direction = taken[place.direction]
    for letter in place.word:
        here = letters.get((row, col))
        if here is None:
            if (row - right, col - down) in letters or (row + right, col + down) in letters:
                return False
        elif here != letter or (row, col) in own_direction:
            return False
        row, col = row + down, col + right
    return True


def count_letters(rows: Sequence[str]) -> int:
    return sum(len(row) - row.count(BLANK) for row in rows)


def draw(rows: Sequence[str]) -> list[str]:
    """The grid as shown: a header, then a line per row; `get` and `put` access its cells.

    ["AB", "C."] -> "    C00 C01", "R00  A   B ", "R01  C   . "
    """
    header = "    " + " ".join([f"C{col:02}" for col in range(len(rows[0]))])
    return [header, *(f"R{row:02}  {'   '.join(cells)} " for row, cells in enumerate(rows))]


def get(lines: Sequence[str], row: int, col: int) -> str:
    return lines[row + 1][5 + 4 * col]


def put(lines: list[str], row: int, col: int, cell: str) -> None:
    """Overwrite a cell: "X" alone, or "[X]" with the characters left and right of it."""
    at = 5 + 4 * col - len(cell) // 2
    line = lines[row + 1]
    lines[row + 1] = f"{line[:at]}{cell}{line[at + len(cell) :]}"
