"""Sokoban: push every box onto a goal."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

from graft_envs.games.base import Game, MoveResult, invalid
from graft_envs.games.sokoban_levels import DIRECTIONS, FLOOR, GOAL, WALL, make_level
from graft_envs.games.solvers.sokoban import solve

PLAYER, BOX, BOX_ON_GOAL = "P", "X", "√"


class Sokoban(Game):
    """1.0 when all boxes are on goals; at the turn limit the share of boxes that are.

    Every level has a solution within the turn limit: `answer`. Nothing is paid before the end, because
    a box can be pushed off its goal again.
    """

    pattern = re.compile(r"\\boxed\{\s{0,9}(up|down|left|right)\s{0,9}\}", re.ASCII | re.IGNORECASE)
    SIZES = ((6, 6, 2, 20), (8, 8, 5, 50))  # rows, cols (dim_room), num_boxes, max_turns
    saved = (*Game.saved, "room", "cells", "player", "cols", "num_boxes")
    rows: int
    cols: int
    num_boxes: int

    def __init__(
        self,
        *,
        dim_room: Sequence[int] | None = (6, 6),
        num_boxes: int | None = 2,
        max_turns: int | None = 20,
    ) -> None:
        if dim_room is not None and (
            not isinstance(dim_room, Sequence) or len(dim_room) != 2 or min(dim_room) < 3
        ):
            raise ValueError(
                f"dim_room={dim_room}: must be (rows, columns), walls included and 3 or more each"
            )
        if num_boxes is not None and num_boxes < 1:
            raise ValueError(f"num_boxes={num_boxes}: must be 1 or more")
        rows, cols = dim_room or (None, None)
        super().__init__(max_turns, rows=rows, cols=cols, num_boxes=num_boxes)
        self.room = ""  # walls, floor and goals, row after row: the fixed part
        self.cells: list[str] = []  # what is shown: the room with boxes and player
        self.player = 0

    def draw_instance(self) -> None:
        level = make_level(self.rng, self.rows, self.cols, self.num_boxes, self.max_turns or 1)
        self.room, self.player, self.answer = level.room, level.player, level.solution
        self.cells = list(level.room)
        for at in level.boxes:
            self.cells[at] = BOX
        self.cells[level.player] = PLAYER

    def rules(self) -> str:
        return (
            f"Push all boxes onto goals. Walking into a box pushes it one cell, if the cell behind "
            "it is free; boxes cannot be pulled, and two cannot be pushed at once.\n"
            f"Signs: {PLAYER} you, {WALL} wall, {BOX} box, {GOAL} goal, {BOX_ON_GOAL} box on a goal, "
            f"{FLOOR} floor. A goal under you is not shown.\n"
            f"You have {self.max_turns} turns. Write each step as \\boxed{{direction}}, with up, "
            "down, left or right, for example \\boxed{up}. What happened so far is shown to you."
        )

    def board(self) -> str:
        cells, cols = self.cells, self.cols
        rows = [" ".join(cells[at : at + cols]) for at in range(0, len(cells), cols)]
        return "Board:\n" + "\n".join(rows) + "\nYour next move:"

    def move(self, direction: str) -> MoveResult:
        direction = direction.lower()
        down, right = DIRECTIONS[direction]
        step = down * self.cols + right
        target = self.player + step
        sign = self.cells[target]  # never outside: the outer ring is walls
        if sign in (FLOOR, GOAL):
            self.walk(target)
            return f"{direction}.", 0.0, False
        if sign == WALL:
            return invalid(f"{direction}: there is a wall.")
        behind = target + step
        if self.cells[behind] not in (FLOOR, GOAL):
            return invalid(f"{direction}: the box cannot move.")
        self.cells[behind] = BOX_ON_GOAL if self.room[behind] == GOAL else BOX
        self.walk(target)
        if self.cells.count(BOX_ON_GOAL) == self.num_boxes:
            return f"{direction}, pushing a box. All boxes are on goals: you win.", 1.0, True
        return f"{direction}, pushing a box.", 0.0, False

    def walk(self, to: int) -> None:
        self.cells[self.player] = self.room[self.player]
        self.cells[to] = PLAYER
        self.player = to

    def reward_at_limit(self, reward: float) -> float:
        return self.cells.count(BOX_ON_GOAL) / self.num_boxes

    def teacher_moves(self, rng: random.Random) -> Iterator[str]:
        """The fewest steps; if the search gives up, the solution of the level."""
        way = solve(
            {at for at, sign in enumerate(self.room) if sign != WALL},
            {at for at, sign in enumerate(self.room) if sign == GOAL},
            [at for at, sign in enumerate(self.cells) if sign in (BOX, BOX_ON_GOAL)],
            self.player,
            {name: down * self.cols + right for name, (down, right) in DIRECTIONS.items()},
        )
        if way is None and self.turns:
            raise NotImplementedError(
                f"Sokoban: no solution was found from the position after turn {self.turns}; call "
                "demonstrate() at the start of a game"
            )
        return iter(self.answer if way is None else way)

    def sample_random_action(self) -> str:
        return f"\\boxed{{{self.action_rng().choice(tuple(DIRECTIONS))}}}"
