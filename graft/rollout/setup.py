"""What every rollout of a run needs: engine, chat template, environments, and their limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol

from graft.actions.actions import Actions
from graft.protocols import Engine, Env, Reward
from graft.rollout.failure import RolloutFailure
from graft.text.chat import Chat
from graft.types import Episode, Leaf, Sampling, Span, Task


class ProgramAttempt(Protocol):
    """An attempt that a program makes, which calls the policy itself."""

    number: int
    leaf: Leaf | None
    failure: RolloutFailure | None
    """Why it failed; its leaf has the status."""
    source: ProgramAttempt | None
    """The attempt that it forks; None: it begins at the start."""
    num_replayed: int
    """Its first calls, which are answered from the record of `source`."""

    @property
    def calls(self) -> Sequence[Sequence[Span]]:
        """What was sampled for each call of a complete attempt, in order."""
        ...

    @property
    def is_given_up(self) -> bool:
        """Whether the first calls of a fork were not those of the record."""
        ...

    async def finish(self) -> None: ...


class ProgramGroup(Protocol):
    """The attempts of programs at one task."""

    def attempt(self, number: int) -> ProgramAttempt: ...
    def fork(self, number: int, source: ProgramAttempt, num_replayed: int) -> ProgramAttempt:
        """An attempt that repeats the first calls of a complete one."""
        ...

    def drop(self, attempt: ProgramAttempt) -> None:
        """Take out a fork that was given up."""
        ...

    def episode(self) -> Episode: ...
    def close(self) -> None: ...


class ProgramRunner(Protocol):
    """Programs that attempt tasks: agents of others (`graft.gateway.attempts`)."""

    def open(
        self,
        task: Task,
        setup: RolloutSetup,
        fresh_env: Callable[[], Awaitable[Env]],
        has_machine: bool = False,
    ) -> ProgramGroup:
        """has_machine: the environment is an AgentHost, on whose machine commands run."""
        ...

    def close(self) -> None: ...


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
    cut_turns: str = "end"
    """What follows a turn that its limit of tokens cut off: "end" of the attempt, or a "step" with
    `INVALID_ACTION`."""
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
    agent: ProgramRunner | None = None
    """Programs that attempt the tasks; None: the policy acts in the environment."""

    def for_task(self, task: Task) -> RolloutSetup:
        """The setup of one task."""
        own = self.by_env.get(task.env)
        if own is None:
            return self
        return replace(self, reward=own.reward, prefill=own.prefill, by_env={})

    def close(self) -> None:
        """Close the engines, and the address of the agents."""
        if self.agent is not None:
            self.agent.close()
        for engine in (self.engine, *self.frozen.values()):
            engine.close()


def draw_key(salt: int, task: str, number: int) -> int:
    """64 bits that seed the draws of attempt `number`, independent of what runs beside it."""
    text = f"{salt}/{task}/{number}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


@lru_cache(maxsize=1024)  # one object for equal settings: the engine batches by identity
def limited_sampling(
    base: Sampling, limit: int, stop: tuple[str, ...], ends: tuple[int, ...], begun: int
) -> Sampling:
    """A sampling with at most `limit` more tokens of a turn that has `begun`, and with these ends."""
    return replace(
        base,
        max_tokens=limit,
        min_tokens=min(max(base.min_tokens - begun, 0), limit),
        stop=(*base.stop, *stop),
        stop_tokens=(*base.stop_tokens, *ends),
        num_begun=begun,
    )
