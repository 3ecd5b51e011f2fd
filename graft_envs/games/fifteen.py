"""Slide numbered tiles into order through the one empty place."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import lru_cache

from graft_envs.games.base import Game, MoveResult, invalid
from graft_envs.games.solvers.fifteen import solve

SHOWN = ("__", *(f"{tile:>2}" for tile in range(1, 100)))
MOVES = ("up", "down", "left", "right")
START_ALGORITHMS = ("monte_carlo", "pure_random")


class FifteenPuzzle(Game):
    """1.0 for the ordered board; at the turn limit the share of places that are right.

        1  2  3
        4 __  5      "left" moves the 5 into the gap, "up" then the 6: solved
        7  8  6

    Every start is solvable and not solved yet: `monte_carlo` moves the gap from the ordered board,
    never straight back, by half to all of `mc_rand_moves` steps; `pure_random` draws among all boards.
    """

    pattern = re.compile(r"\\boxed\{\s*+(up|down|left|right)\s*+\}", re.ASCII | re.IGNORECASE)
    SIZES = ((2, 10), (3, 20), (4, 50))  # num_rows, max_turns
    saved = (*Game.saved, "num_rows", "tiles")
    num_rows: int

    def __init__(
        self,
        *,
        num_rows: int | None = 3,
        max_turns: int | None = 20,
        init_algo: str = "monte_carlo",
        mc_rand_moves: int = 100,
    ) -> None:
        super().__init__(max_turns, num_rows=num_rows)
        if not 2 <= self.num_rows <= 10:
            raise ValueError(f"{num_rows=}: must be from 2 to 10")
        if init_algo not in START_ALGORITHMS:
            raise ValueError(f"{init_algo=}: must be one of {', '.join(START_ALGORITHMS)}")
        if mc_rand_moves < 1:
            raise ValueError(f"{mc_rand_moves=}: must be 1 or more, or the board is solved")
        self.init_algo, self.mc_rand_moves = init_algo, mc_rand_moves
        self.tiles: list[int] = []
        """Row by row; 0 is the gap."""

    def draw_instance(self) -> None:
        draw = self.walk if self.init_algo == "monte_carlo" else self.shuffle
        self.tiles = draw()
        while self.tiles == goal(self.num_rows):
            self.tiles = draw()

    def walk(self) -> list[int]:
        ways = paths(self.num_rows)
        tiles = goal(self.num_rows).copy()
        before, gap = -1, len(tiles) - 1
        # the number of steps is drawn too: its parity (on 2x2 the number itself) decides the end
        steps = self.rng.randint((self.mc_rand_moves + 1) // 2, self.mc_rand_moves)
        if self.num_rows == 2:
            steps %= 12  # without turning back the walk repeats after 12 boards
        random_bits = 0
        for _ in range(steps):
            reachable = ways[gap][before]
            following = reachable[0]
            if len(reachable) > 1:
                if random_bits < 1 << 30:  # about 20 of these choices fit into one draw
                    random_bits = self.rng.getrandbits(64)
                random_bits, at = divmod(random_bits, len(reachable))
                following = reachable[at]
            tiles[gap] = tiles[following]
            before, gap = gap, following
        tiles[gap] = 0
        return tiles

    def shuffle(self) -> list[int]:
        tiles = list(range(self.num_rows**2))
        self.rng.shuffle(tiles)
        if not is_solvable(tiles, self.num_rows):
            first, second = (place for place, tile in enumerate(tiles) if tile in (1, 2))
            tiles[first], tiles[second] = tiles[second], tiles[first]
        return tiles

    def rules(self) -> str:
        return (
            f"Put the tiles 1 to {self.num_rows**2 - 1} of a {self.num_rows} x {self.num_rows} board "
            "in order, row by row, with the gap (shown as __) in the bottom right corner. A move slides "
            "a tile into the gap: up moves the tile below it up, down the tile above it down, left the "
            "tile to its right to the left, right the tile to its left to the right.\n"
            f"You have {self.max_turns} turns. Write each move as \\boxed{{direction}}, for example "
            "\\boxed{up}. What happened so far is shown to you."
        )

    def board(self) -> str:
        return layout(self.num_rows) % tuple([SHOWN[tile] for tile in self.tiles])

    def move(self, direction: str) -> MoveResult:
        direction = direction.lower()
        gap = self.tiles.index(0)
        tile = sources(self.num_rows)[gap].get(direction)
        if tile is None:
            return invalid(f"{direction}: no tile can move that way.")
        tiles = self.tiles
        tiles[gap], tiles[tile] = tiles[tile], 0
        if tiles == goal(self.num_rows):
            return f"{direction}. The board is in order.", 1.0, True
        return f"{direction}. Tile {tiles[gap]} moved.", 0.0, False

    def reward_at_limit(self, reward: float) -> float:
        right = goal(self.num_rows)
        num_right = sum(tile == want for tile, want in zip(self.tiles, right, strict=True))
        return num_right / len(right)

    def teacher_moves(self, rng: random.Random) -> Iterator[str]:
        """A solution within the turns, if the solver finds one."""
        ways = sources(self.num_rows)
        next_to = [list(around.values()) for around in ways]
        for place in solve(self.tiles, next_to, (self.max_turns or 0) - self.turns):
            around = ways[self.tiles.index(0)]
            yield next(word for word, tile in around.items() if tile == place)

    def sample_random_action(self) -> str:
        gap = self.tiles.index(0) if self.tiles else 0
        return f"\\boxed{{{self.action_rng().choice(list(sources(self.num_rows)[gap]))}}}"


@lru_cache(64)
def goal(num_rows: int) -> list[int]:
    """The ordered board, shared: copy it before writing. goal(2) -> [1, 2, 3, 0]."""
    return [*range(1, num_rows**2), 0]


@lru_cache(64)
def sources(num_rows: int) -> tuple[dict[str, int], ...]:
    """The place of the tile that each move slides into the gap, for each place of the gap."""
    found: list[dict[str, int]] = []
    for gap in range(num_rows**2):
        row, col = divmod(gap, num_rows)
        tiles = zip(
            MOVES, ((row + 1, col), (row - 1, col), (row, col + 1), (row, col - 1)), strict=True
        )
        found.append(
            {
                word: r * num_rows + c
                for word, (r, c) in tiles
                if 0 <= r < num_rows and 0 <= c < num_rows
            }
        )
    return tuple(found)


@lru_cache(64)
def paths(num_rows: int) -> tuple[dict[int, tuple[int, ...]], ...]:
    """The places where the gap can go next: per place of the gap, by its last place (-1: start)."""
    return tuple(
        {
            before: tuple(place for place in tiles.values() if place != before)
            for before in (-1, *tiles.values())
        }
        for tiles in sources(num_rows)
    )


def is_solvable(tiles: list[int], num_rows: int) -> bool:
    """Whether moves can order the board. Each move swaps the gap with a tile and shifts the gap by one.

    So the swaps that would order it and the steps of the gap to its corner are both even or both
    odd. [2, 1, 3, 0] is one swap away from order and the gap is at home: False.
    """
    places = [tile - 1 if tile else len(tiles) - 1 for tile in tiles]
    swaps = 0
    for place in range(len(places)):
        while places[place] != place:
            other = places[place]
            places[place], places[other] = places[other], other
            swaps += 1
    row, col = divmod(tiles.index(0), num_rows)
    return (swaps + row + col) % 2 == 0  # from either corner the number of steps has one parity


@lru_cache(64)
def layout(num_rows: int) -> str:
    """The board with a place for every tile."""
    return (
        "The board:\n" + "\n".join([" ".join(["%s"] * num_rows)] * num_rows) + "\nYour next move:"
    )
