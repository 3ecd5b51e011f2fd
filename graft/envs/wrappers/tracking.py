"""Counts an episode's steps and rewards. The outermost wrapper."""

from __future__ import annotations

from typing import Any

from graft.envs.base import Wrapper
from graft.protocols import Env, Observation
from graft.types import Turn


class EpisodeTracking(Wrapper):
    """Adds `step_counter` and `cumulative_rewards` to info; after a reset the last episode's too.

    Two steps with rewards 0 and 1, then reset(): info["prev_ep_step_counter"] is 2 and
    info["prev_ep_cumulative_rewards"] is 1.0, so a vector with autoreset loses neither.
    """

    saved = ("step_counter", "cumulative_rewards")

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self.step_counter = 0
        self.cumulative_rewards = 0.0

    def reset(self, seed: int | None = None, **options: Any) -> tuple[Observation, dict[str, Any]]:
        observation, info = self.env.reset(seed, **options)
        before = {f"prev_ep_{name}": getattr(self, name) for name in self.saved}
        self.step_counter, self.cumulative_rewards = 0, 0.0
        return observation, {**info, **self._counters(), **before}

    def step(self, action: str) -> Turn:
        turn: Turn = self.env.step(action)
        self.step_counter += 1
        self.cumulative_rewards += turn.reward
        return turn._replace(info={**turn.info, **self._counters()})

    def _counters(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.saved}
