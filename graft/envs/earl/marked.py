"""Questions of CalcBench whose answer is one number after "####"."""

from __future__ import annotations

from graft.envs.base import BaseEnv
from graft.rewards.answers import same_number
from graft.text.parse import marked_number
from graft.types import Turn

MAX_TRIES = 10_000  # draws until an instance has the wanted split


class MarkedNumber(BaseEnv):
    """One turn: 1.0 if the number after the last "####" is the answer, else 0.0."""

    def respond(self, action: str) -> Turn:
        is_right = same_number(marked_number(action) or "", self.answer)
        return Turn(reward=float(is_right), terminated=True, info={"is_right": is_right})

    def sample_random_action(self) -> str:
        return f"#### {self.action_rng().randrange(10)}"
