"""What calls of tools earn: a little, and less than a right answer."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import lru_cache

log = logging.getLogger(__name__)

MAX_TOOL_REWARD = 0.5
"""What all calls of an episode may earn: half of a right answer."""
RIGHT_ANSWER = 1.0
"""What nearly every environment gives for solving its task."""


@dataclass(frozen=True, slots=True)
class CallRewards:
    """The reward of every call, what a call that succeeds earns on top, and, if not 0, all that a failed one
    earns; `most` limits what the calls of an episode earn together."""

    call: float = 0.0
    success: float = 0.0
    error: float = 0.0
    most: float | None = MAX_TOOL_REWARD

    def __post_init__(self) -> None:
        if self.most is not None and self.most < 0:
            raise ValueError(
                f"max_tool_reward={self.most}: must be 0 or more, or None for no limit; calls cost with a "
                "negative tool_reward"
            )

    def reward(self, is_ok: bool, earned: float) -> float:
        """The reward of one call, after calls that have `earned` something."""
        reward = self.call + self.success if is_ok else self.error or self.call
        if self.most is not None and reward > 0:
            reward = min(reward, max(0.0, self.most - earned))
        return reward

    def most_of(self, calls: int | None) -> float:
        """The most that this number of calls can earn; infinity without a limit."""
        once = max(self.call + self.success, self.call, 0.0)
        if once == 0.0:
            return 0.0
        total = math.inf if calls is None else once * calls
        return total if self.most is None else min(total, self.most)

    def check(self, calls: int | None) -> None:
        """Warn where an episode of this many calls can earn as much as a right answer."""
        if (most := self.most_of(calls)) >= RIGHT_ANSWER:
            _warn_of_calls(most)


@lru_cache(maxsize=8)  # once for the environments of a run, which are alike
def _warn_of_calls(most: float) -> None:
    log.warning(
        "the calls of one attempt may earn %s, and a right answer usually earns 1: a policy learns to make "
        "calls instead. Lower tool_reward and tool_success_reward, or leave max_tool_reward at %g",
        "any amount" if math.isinf(most) else f"{most:g}",
        MAX_TOOL_REWARD,
    )
