"""Order a board of sliding tiles: by a search, or line by line where a search takes too long.

    1  2  3      The gap goes right and then down: places 5 and 8, counted row by row from 0. A
    4 __  5      path is the list of places that the gap takes; `next_to` has for each place the
    7  8  6      places where the gap can go. Tile 1 belongs to place 0, tile 2 to place 1, ...

The search expands the board with the least (moves so far) + weight x (lower bound of moves left).
With weight 1 it finds a shortest path; larger weights are faster and the path a little longer.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from functools import lru_cache
from math import isqrt

NextTo = Sequence[Collection[int]]
MAX_BOARDS = 40_000
"""Boards that a search expands before it gives up: half a second, about 50 MB."""
SHORTEST_UP_TO = 3
"""Most rows of a board that is solved by a shortest path: 3 x 3 needs a few thousand boards at most."""
QUICK = 1.5
HASTY = 4.0
OTHER = 255
"""A tile that may end anywhere."""
NO_LIMIT = 10**9


def solve(tiles: Sequence[int], next_to: NextTo, max_moves: int) -> list[int]:
    """A path that orders the board, of at most `max_moves` if the search finds one.

    Up to 3 x 3 it is a shortest path, whatever `max_moves`.
    """
    if isqrt(len(tiles)) <= SHORTEST_UP_TO:
        way = search(tiles, next_to, 1.0)
    else:
        way = search(tiles, next_to, QUICK, max_moves=max_moves)
    return way or line_by_line(tiles, next_to)


def line_by_line(tiles: Sequence[int], next_to: NextTo) -> list[int]:
    """Top row, left column, and so on inwards; finished lines stay. The last 3 x 3 as a whole.

    The last two tiles of a line are placed together: with one in place the other cannot get in.
    """
    num_rows = isqrt(len(tiles))
    way: list[int] = []
    board, done = list(tiles), set[int]()

    def bring(places: Sequence[int]) -> None:
        wanted = [place + 1 for place in places]
        found = search(board, next_to, HASTY, wanted=wanted, done=done)
        assert found is not None, "two tiles can always be placed in a line"
        for place in found:
            gap = board.index(0)
            board[gap], board[place] = board[place], 0
        way.extend(found)
        done.update(places)

    for first in range(num_rows - SHORTEST_UP_TO):
        inner = range(first, num_rows)
        top = [first * num_rows + col for col in inner]
        left = [row * num_rows + first for row in inner[1:]]
        for line in (top, left):
            for place in line[:-2]:
                bring([place])
            bring(line[-2:])
    bring([place for place in range(num_rows**2 - 1) if place not in done])
    return way


def search(
    tiles: Sequence[int],
    next_to: NextTo,
    weight: float,
    *,
    wanted: Collection[int] | None = None,
    done: Collection[int] = (),
    max_moves: int = NO_LIMIT,
) -> list[int] | None:
    """A path that brings the `wanted` tiles (None: all) to their places, or None.

    Places that are `done` are walls. Boards from which the goal cannot be reached within `max_moves`
    are pruned, so None before MAX_BOARDS boards proves that there is no such path.
    """
    num_rows = isqrt(len(tiles))
    far, lines = distances(num_rows), homes(num_rows)
    ways = [[place for place in around if place not in done] for around in next_to]
    board = bytes(t if not t or wanted is None or t in wanted else OTHER for t in tiles)
    gap = board.index(0)
    least = sum(far[tile][place] for place, tile in enumerate(board) if tile)
    least += sum(detours(board[cut], home) for cut, home in lines)
    before: dict[bytes, tuple[int, bytes]] = {board: (0, b"")}
    edge = [(weight * least, least, 0, gap, board)]
    for _ in range(MAX_BOARDS):
        if not edge:
            return None
        _, least, moves, gap, board = heapq.heappop(edge)
        if not least:
            return trail(before, board)
        if before[board][0] < moves:
            continue  # reached by a shorter way meanwhile
        for place in ways[gap]:
            tile = board[place]
            moved = bytearray(board)
            moved[gap], moved[place] = tile, 0
            new = bytes(moved)
            known = before.get(new)
            if known is not None and known[0] <= moves + 1:
                continue
            still = least + far[tile][gap] - far[tile][place]
            # a sideways step keeps the order within its row: only two columns change
            across = num_rows if abs(place - gap) == 1 else 0
            for at in (gap, place):
                cut, home = lines[across + (at % num_rows if across else at // num_rows)]
                still += detours(new[cut], home) - detours(board[cut], home)
            if moves + 1 + still <= max_moves:
                before[new] = (moves + 1, board)
                heapq.heappush(edge, (moves + 1 + weight * still, still, moves + 1, place, new))
    return None


def trail(before: dict[bytes, tuple[int, bytes]], board: bytes) -> list[int]:
    way: list[int] = []
    while previous := before[board][1]:
        way.append(board.index(0))
        board = previous
    return way[::-1]


@lru_cache(16)
def distances(num_rows: int) -> tuple[tuple[int, ...], ...]:
    """The distance of each tile from its place, by position; the last row is for tiles without a place."""
    places = [divmod(place, num_rows) for place in range(num_rows**2)]
    rows = [
        tuple(abs(row - home[0]) + abs(col - home[1]) for row, col in places) for home in places
    ]
    nowhere = (0,) * len(places)
    return (nowhere, *rows[:-1], *[nowhere] * (OTHER + 1 - len(rows)))


@lru_cache(16)
def homes(num_rows: int) -> tuple[tuple[slice, range], ...]:
    """The slice of a board of each row, then each column, and the tiles that belong there."""
    last = num_rows**2
    rows = [
        (slice(at, at + num_rows), range(at + 1, at + num_rows + 1))
        for at in range(0, last, num_rows)
    ]
    cols = [
        (slice(at, last, num_rows), range(at + 1, last + 1, num_rows)) for at in range(num_rows)
    ]
    return (*rows, *cols)


@lru_cache(1 << 16)
def detours(line: bytes, home: range) -> int:
    """Moves that distances do not count: tiles in their own line, but in the wrong order.

    3 1 2: the 3 must leave the line and come back to let the others pass, 2 moves.
    """
    own = [tile for tile in line if tile in home]
    longest: list[int] = []  # length of the longest ordered subsequence that ends with this tile
    for number, tile in enumerate(own):
        longest.append(
            1 + max([n for n, t in zip(longest, own[:number], strict=True) if t < tile], default=0)
        )
    return 2 * (len(own) - max(longest, default=0))
