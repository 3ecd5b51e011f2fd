"""Envs whose every number can be worked out by hand, and some that misbehave."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

from graft.envs.base import BaseEnv
from graft.types import Turn


class Adder(BaseEnv):
    """Starts at seed % 100; "3" adds 3, an action's number is its reward, "end" ends with reward 1.

    Other words misbehave: "raise", "hang", "nap", "spin", "die", "exit", "cancel",
    "object".
    """

    max_turns = None
    saved = (*BaseEnv.saved, "total")

    def __init__(self, *, add: int = 0, pause: float = 0.0, tells_seed: bool = True) -> None:
        super().__init__()
        self.add, self.pause, self.tells_seed = add, pause, tells_seed
        self.total = 0

    def pose(self) -> str:
        self.total = self.seed % 100 + self.add
        return f"start {self.total}"

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(seed)
        return observation, info if self.tells_seed else {}

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
        if action == "spin":
            return Turn(str(9**9**9))  # one C function that never lets another thread run
        if action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "exit":
            raise SystemExit(3)
        if action == "cancel":
            raise asyncio.CancelledError  # no Exception, but no wish of the caller either
        if action == "object":
            return Turn("odd", info={"lock": lambda: None})
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
