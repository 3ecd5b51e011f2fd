"""A walk to the exit of a square: the policy writes one letter a turn, N, E, S or W."""

from __future__ import annotations

from graft import BaseEnv, Turn

STEPS = {"N": (0, 1), "E": (1, 0), "S": (0, -1), "W": (-1, 0)}


class Maze(BaseEnv):
    """1.0 at the exit; the walls are those of the square."""

    saved = (*BaseEnv.saved, "x", "y", "exit_x", "exit_y")

    def __init__(self, size: int = 3, max_turns: int = 8) -> None:
        super().__init__()
        self.size, self.max_turns = size, max_turns
        self.x = self.y = self.exit_x = self.exit_y = 0

    def pose(self) -> str:
        self.x = self.y = 0
        self.exit_x = self.rng.randrange(1, self.size)
        self.exit_y = self.rng.randrange(1, self.size)
        return f"You are at 0,0. The exit is at {self.exit_x},{self.exit_y}. Write N, E, S or W."

    def respond(self, action: str) -> Turn:
        dx, dy = STEPS.get(action.strip()[-1:].upper(), (0, 0))
        self.x = min(max(self.x + dx, 0), self.size - 1)
        self.y = min(max(self.y + dy, 0), self.size - 1)
        if (self.x, self.y) == (self.exit_x, self.exit_y):
            return Turn(reward=1.0, terminated=True)
        return Turn(f"You are at {self.x},{self.y}.")
