"""Sokoban levels with a solution.

A level is played backwards: the boxes start on the goals and the player pulls them away. In reverse
that play is a solution; pulling stops before it exceeds the turn limit.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Set
from typing import NamedTuple

WALL, FLOOR, GOAL = "#", "_", "O"
DIRECTIONS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}

TURN_CHANCE = 0.35
"""The probability that the walk that carves a room changes direction."""
STAMPS = (
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, 0), (1, -1)),
    ((0, 0), (0, 1), (1, 0)),
)
"""Floor that each step of the walk adds, as (row, column) from its position."""
MAX_ROOMS = 400
PLAYS_PER_ROOM = 4


class Level(NamedTuple):
    """Cells are numbered row after row."""

    boxes: list[int]
    player: int
    solution: list[str]
    score: int = 0
    """How much planning it takes; 0: no position of a backward play is a level."""
    room: str = ""


def make_level(rng: random.Random, rows: int, cols: int, num_boxes: int, max_moves: int) -> Level:
    """A level with `num_boxes` boxes, none on a goal, and a solution of at most `max_moves` steps.

    Of a few backward plays in the first room that has a valid one, the one kept maximises (changes
    from box to box) x (distances of the boxes from their goals): more planning, not just more steps.
    """
    # hundreds of draws, and the caller's generator is slow
    fast = random.Random(rng.getrandbits(64))
    for _ in range(MAX_ROOMS):
        floor = carve(fast, rows, cols)
        if len(floor) < num_boxes + 2:
            continue
        goals = fast.sample(sorted(floor), num_boxes)
        plays = [play_backwards(fast, floor, cols, goals, max_moves) for _ in range(PLAYS_PER_ROOM)]
        best = max(plays, key=lambda play: play.score)
        if best.score > 0:
            signs = [FLOOR if at in floor else WALL for at in range(rows * cols)]
            for at in goals:
                signs[at] = GOAL
            return best._replace(room="".join(signs), boxes=sorted(best.boxes))
    raise ValueError(
        f"no Sokoban level found: dim_room=({rows}, {cols}), num_boxes={num_boxes}, "
        f"max_turns={max_moves}; take a larger room, fewer boxes or more turns"
    )


def carve(rng: random.Random, rows: int, cols: int) -> set[int]:
    """The floor of a room: a random walk adds floor around it. The outer ring stays wall."""
    compass = tuple(DIRECTIONS.values())
    row, col = rng.randint(1, rows - 2), rng.randint(1, cols - 2)
    down, right = rng.choice(compass)
    floor: set[int] = set()
    for _ in range(int(1.7 * (rows + cols))):
        if rng.random() < TURN_CHANCE:
            down, right = rng.choice(compass)
        row = max(1, min(rows - 2, row + down))
        col = max(1, min(cols - 2, col + right))
        for below, beside in rng.choice(STAMPS):
            if 0 < row + below < rows - 1 and 0 < col + beside < cols - 1:
                floor.add((row + below) * cols + col + beside)
    return floor


def play_backwards(
    rng: random.Random, floor: set[int], cols: int, goals: list[int], max_moves: int
) -> Level:
    """Pull boxes at random from their goals; the best position of the play."""
    steps = {name: down * cols + right for name, (down, right) in DIRECTIONS.items()}
    boxes = list(goals)
    targets = set(goals)
    free = floor - targets
    undone: list[str] = []  # the player's moves, backwards in time
    player, last, changes = -1, -1, 0
    best = Level([], -1, [])
    for _ in range(max_moves):
        reached = walks(player, free, steps, max_moves - len(undone) - 1)
        pulls = [
            (number, name)
            for number, box in enumerate(boxes)
            for name, step in steps.items()
            if box + step in reached and box + 2 * step in free
        ]
        # boxes still on goals first: a level has no box on a goal
        pulls = [pull for pull in pulls if boxes[pull[0]] in targets] or pulls
        if not pulls:
            break
        number, name = rng.choice(pulls)
        undone += [*path_to(boxes[number] + steps[name], reached, steps), name]
        free.add(boxes[number])
        boxes[number] += steps[name]
        free.remove(boxes[number])
        player = boxes[number] + steps[name]
        changes += number != last
        last = number
        if targets.issuperset(boxes):
            # all on goals again: the moves so far are not part of a solution
            goals, undone, player, last, changes = list(boxes), [], -1, -1, 0
            continue
        if player in targets or not targets.isdisjoint(boxes):
            continue
        score = changes * sum(
            abs(box // cols - goal // cols) + abs(box % cols - goal % cols)
            for box, goal in zip(boxes, goals, strict=True)
        )
        if score > best.score:
            best = Level(list(boxes), player, list(undone), score)
    return best._replace(solution=[OPPOSITE[name] for name in reversed(best.solution)])


def walks(
    player: int, free: Set[int], steps: Mapping[str, int], max_steps: int
) -> dict[int, str | None]:
    """The reachable cells, each with the last step of a shortest path to it.

    Before the first pull (player = -1) the player may be anywhere.
    """
    if max_steps < 0:
        return {}
    if player < 0:
        return dict.fromkeys(free)
    reached: dict[int, str | None] = {player: None}
    edge = [player]
    for _ in range(max_steps):
        further: list[int] = []
        for cell in edge:
            for name, step in steps.items():
                if (there := cell + step) in free and there not in reached:
                    reached[there] = name
                    further.append(there)
        edge = further
    return reached


def path_to(cell: int, reached: dict[int, str | None], steps: Mapping[str, int]) -> list[str]:
    path: list[str] = []
    while (name := reached[cell]) is not None:
        path.append(name)
        cell -= steps[name]
    return path[::-1]
