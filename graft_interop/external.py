"""The base class of other libraries' envs: their state is their seed and their actions.

    get_state -> {"seed": 7, "actions": ["a", "b"], ...}
    set_state -> reset(7), step("a"), step("b")

Their inner state is not accessible, but an env that is fixed by its seed can replay its actions.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from graft.envs.base import BaseEnv
from graft.envs.plain import plain
from graft.protocols import Observation
from graft.types import Turn


class ExternalEnv(BaseEnv):
    """A subclass writes `begin` and `respond`; both may return any info of the library's."""

    max_turns: int | None = None
    saved = (*BaseEnv.saved, "actions")

    def __init__(self, max_turns: int | None = None) -> None:
        super().__init__()
        if max_turns is not None and max_turns < 1:
            raise ValueError(f"max_turns={max_turns}: must be 1 or more, or None")
        self.max_turns = max_turns
        self.actions: list[str] = []
        self.first_info: dict[str, Any] = {}

    def begin(self, seed: int) -> tuple[Observation, Mapping[str, Any]]:
        """Start the episode of `seed`; return what the policy sees, and the library's info."""
        raise NotImplementedError(f"{type(self).__name__} must write begin()")

    def pose(self) -> Observation:
        observation, info = self.begin(self.seed)
        self.first_info = plain(info)
        return observation

    def reset(self, seed: int | None = None) -> tuple[Observation, dict[str, Any]]:
        self.actions = []
        observation, info = super().reset(seed)
        return observation, {**self.first_info, **info}

    def step(self, action: str) -> Turn:
        turn = super().step(action)
        self.actions.append(action)
        return turn._replace(reward=float(turn.reward), info=plain(turn.info))

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Bring the env to the state of the snapshot by replaying its episode."""
        if state["actions"] or not state["is_over"]:
            self.reset(state["seed"])
            for action in state["actions"]:
                self.step(action)
        super().set_state(state)


def can_copy(thing: Any) -> bool:
    """Whether deepcopy works on it; libraries raise many different exceptions if not."""
    try:
        copy.deepcopy(thing)
    except Exception:
        return False
    return True


def as_text(value: Any) -> str:
    """An observation as text; as JSON unless it is text."""
    return value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)
