"""Envs whose every number can be worked out by hand, and some that misbehave."""

from __future__ import annotations

import asyncio
import time

from graft.envs.base import BaseEnv
from graft.types import Turn


class Adder(BaseEnv):
    """Starts at seed % 100; "3" adds 3, an action's number is its reward, "end" ends with reward 1.

    Other actions misbehave: "raise", "hang", "nap", "exit", "cancel".
    """

    max_turns = None
    saved = (*BaseEnv.saved, "total")

    def __init__(self, *, add: int = 0, pause: float = 0.0) -> None:
        super().__init__()
        self.add, self.pause = add, pause
        self.total = 0

    def pose(self) -> str:
        self.total = self.seed % 100 + self.add
        return f"start {self.total}"

    def respond(self, action: str) -> Turn:
        if self.pause:
            time.sleep(self.pause)
        if action == "end":
            return Turn(f"end {self.total}", reward=1.0, terminated=True, info={"last": self.total})
        if action == "raise":
            raise KeyError("no such luck")
        if action == "hang":
            time.sleep(3600)
        if action == "nap":
            time.sleep(0.6)
            return Turn("late")
        if action == "exit":
            raise SystemExit(3)
        if action == "cancel":
            raise asyncio.CancelledError  # no Exception, but no wish of the caller either
        self.total += int(action)
        return Turn(f"total {self.total}", reward=float(action))

    def sample_random_action(self) -> str:
        return str(self.rng.randint(1, 9))


class Waiter(Adder):
    blocking = True


class Unbuildable(Adder):
    def __init__(self) -> None:
        raise ValueError("no licence for this env")


class NoReset(Adder):
    """Fails in its first reset, works in the second: what a flaky server does."""

    tries = 0

    def pose(self) -> str:
        NoReset.tries += 1
        if NoReset.tries == 2:
            raise ConnectionError("server is away")
        return super().pose()
