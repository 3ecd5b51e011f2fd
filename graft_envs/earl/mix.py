"""An env that is one of several others in every episode."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Self

from graft.envs.base import BaseEnv, Trace
from graft.protocols import Observation
from graft.types import Turn


class Mix(BaseEnv):
    """An episode is one of `parts`, drawn by weight with the instance's seed.

    With a single part nothing is drawn and it gets the seed itself.
    """

    env_id = "mix"
    shared = ("parts",)
    saved = (*BaseEnv.saved, "part")

    def __init__(self, parts: Mapping[str, BaseEnv], weights: Sequence[float], split: str) -> None:
        super().__init__()
        if not parts:
            raise ValueError("tasks=[]: name at least one task to draw from")
        self.parts = dict(parts)
        self.weights = list(weights)
        self.split = split
        self.part = next(iter(self.parts))

    @property
    def current(self) -> Any:
        return self.parts[self.part]

    def pose(self) -> Observation:
        seed = self.seed
        if len(self.parts) > 1:
            self.part = self.rng.choices(list(self.parts), self.weights)[0]
            seed = self.rng.getrandbits(53)
        observation, _ = self.current.reset(seed)
        self.answer = self.current.answer
        return observation

    def respond(self, action: str) -> Turn:
        return self.current.step(action)

    def demonstrate(self, rng: random.Random) -> Trace:
        return self.current.demonstrate(rng)

    def describe(self) -> dict[str, Any]:
        return {"task": self.part, **self.current.describe()}

    def sample_random_action(self) -> str:
        return self.current.sample_random_action()

    def fork(self) -> Self:
        twin = super().fork()
        twin.parts = {name: part.fork() for name, part in self.parts.items()}
        return twin

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "current": self.current.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self.current.set_state(state["current"])
