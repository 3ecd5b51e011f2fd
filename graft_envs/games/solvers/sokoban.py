"""The fewest steps that put every box on a goal.

A position is the places of the boxes and of the player after a push. From there the player
walks to any box that can be reached and pushes it:

    # # # # # #
    # _ P _ _ #      left, down: a walk to the left side of the box; right: the first push, 3 steps
    # _ X _ O #      in all; right: the second, 1 step. 4 steps and 2 pushes.
    # # # # # #

Positions are expanded in the order of (steps so far) + (lower bound of pushes left).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Set

from graft_envs.games.sokoban_levels import path_to, walks

MAX_POSITIONS = 6_000
"""Positions that the search expands before it gives up: about half a second, 20 MB."""

Boxes = frozenset[int]


def solve(
    floor: Set[int],
    goals: Collection[int],
    boxes: Collection[int],
    player: int,
    steps: Mapping[str, int],
) -> list[str] | None:
    """A shortest list of steps; None if there is none, or the search gave up.

    `floor` are all cells that are not walls, goals included; `steps` are the four directions as
    differences of cell numbers.
    """
    pushes = least_pushes(floor, goals, steps)
    start = (player, frozenset(boxes))
    if not pushes.keys() >= start[1]:
        return None
    before: dict[tuple[int, Boxes], tuple[int, tuple[int, Boxes] | None, list[str]]]
    before = {start: (0, None, [])}
    order = 0  # ties: the earlier position first, because sets cannot be compared
    edge = [(sum(pushes[box] for box in start[1]), 0, order, start)]
    for _ in range(MAX_POSITIONS):
        if not edge:
            return None
        _, taken, _, here = heapq.heappop(edge)
        player, at = here
        if before[here][0] < taken:
            continue  # reached in fewer steps meanwhile
        if at.issubset(goals):
            return trail(before, here)
        reached = walks(player, floor - at, steps, len(floor))
        still = sum(pushes[box] for box in at)
        for box in sorted(at):
            for name, step in steps.items():
                beyond = box + step
                if box - step not in reached or beyond in at or beyond not in pushes:
                    continue
                new = (box, at - {box} | {beyond})
                path = [*path_to(box - step, reached, steps), name]
                total = taken + len(path)
                if new in before and before[new][0] <= total:
                    continue
                before[new] = (total, here, path)
                order += 1
                least = total + still - pushes[box] + pushes[beyond]
                heapq.heappush(edge, (least, total, order, new))
    return None


def trail(
    before: Mapping[tuple[int, Boxes], tuple[int, tuple[int, Boxes] | None, list[str]]],
    position: tuple[int, Boxes] | None,
) -> list[str]:
    parts: list[list[str]] = []
    while position is not None:
        _, position, path = before[position]
        parts.append(path)
    return [name for path in reversed(parts) for name in path]


def least_pushes(
    floor: Collection[int], goals: Collection[int], steps: Mapping[str, int]
) -> dict[int, int]:
    """The pushes that bring a single box from each cell to its nearest goal.

    Missing cells are dead ends: a box cannot leave a corner.
    """
    pushes = dict.fromkeys(goals, 0)
    edge = list(goals)
    for cell in edge:  # grows while it is walked
        for step in steps.values():
            # the box came from `cell - step`, and the player stood behind it
            if cell - step in floor and cell - 2 * step in floor and cell - step not in pushes:
                pushes[cell - step] = pushes[cell] + 1
                edge.append(cell - step)
    return pushes
