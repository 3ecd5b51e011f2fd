"""What every rollout of a run needs: engine, chat template, environments, and their limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from graft.actions.actions import Actions
from graft.protocols import Engine, Env, Reward
from graft.text.chat import Chat
from graft.types import Sampling, Task


@dataclass(frozen=True, slots=True)
class EnvSetup:
    """What one of several environments has of its own, besides the environment itself."""

    reward: Reward | None = None
    prefill: str = ""


@dataclass(frozen=True, slots=True)
class RolloutSetup:
    """Engine, chat, environments and limits of the rollouts."""

    engine: Engine
    chat: Chat
    make_env: Callable[[Task], Env]
    sampling: Sampling
    reward: Reward | None = None
    """None: the environment's own rewards, summed over the turns."""
    max_turns: int = 8
    max_context: int = 4096
    deadline: float = 600.0
    """Seconds that a single wait may take: one completion, one answer of an environment."""
    salt: int = 0
    """Makes the draws of this step differ from those of other steps; see `draw_key`."""
    actions: Actions | None = None
    """None: calls are text, and the environment looks for them."""
    prefill: str = ""
    """Text that every answer begins with; part of the prompt, so never trained."""
    start: str = ""
    """The tool of `actions` that every attempt begins with; its entry is never trained."""
    samples: int | None = None
    """Attempts that a branch must produce, twins aside; None: any number."""
    by_env: Mapping[str, EnvSetup] = field(default_factory=dict[str, EnvSetup])
    """Of several environments, by name: what replaces `reward` and `prefill` for their tasks."""
    frozen: Mapping[str, Engine] = field(default_factory=dict[str, Engine])
    """Seats of a game that another model plays, and the engine that samples from it."""
    self_play: bool = False
    """Play all seats of a game; False: one seat, against the game's programs, as a score needs it."""

    def for_task(self, task: Task) -> RolloutSetup:
        """The setup of one task."""
        own = self.by_env.get(task.env)
        if own is None:
            return self
        return replace(self, reward=own.reward, prefill=own.prefill, by_env={})

    def close(self) -> None:
        """Close the engines."""
        for engine in (self.engine, *self.frozen.values()):
            engine.close()


def draw_key(salt: int, task: str, number: int) -> int:
    """64 bits that seed the draws of attempt `number`, independent of what runs beside it."""
    text = f"{salt}/{task}/{number}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
