"""How a policy is sampled, as a caller asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from graft.config import ConfigError
from graft.structure import Structure
from graft.types import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """What a call says about attempts or completions; None leaves a value to the recipe or the default.

    Functions and commands (evaluate, collect, generate, data sample, rollout) build it from their own
    arguments, and it travels whole from there.

    >>> RolloutOptions(samples=4, temperature=0.7).draws
    {'temperature': 0.7}
    """

    DRAWS: ClassVar = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    LIMITS: ClassVar = ("max_tokens", "max_turns", "max_context")

    tasks: int | None = None
    """Tasks, of an evaluation those of each set."""
    samples: int | None = None
    """Attempts per task, or completions per prompt."""
    seed: int | None = None
    """Seed of tasks and draws."""
    temperature: float | None = None
    """0 is greedy."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    """Sampled tokens per turn."""
    stop: tuple[str, ...] | None = None
    """Texts that end a completion."""
    structure: Structure | None = None
    """What a completion must look like."""
    max_turns: int | None = None
    max_context: int | None = None
    """Tokens of a whole attempt, prompt included."""

    def __post_init__(self) -> None:
        try:
            self.make_sampling()
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def select(self, *names: str) -> dict[str, Any]:
        """The values of these fields that are not None."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def draws(self) -> dict[str, Any]:
        """The given settings of `Sampling`, its length and its stops aside."""
        return self.select(*self.DRAWS)

    @property
    def limits(self) -> dict[str, Any]:
        """The given lengths of an attempt."""
        return self.select(*self.LIMITS)

    def make_sampling(self) -> Sampling:
        """The settings of single completions, which no recipe completes."""
        return Sampling(**self.draws, **self.select("max_tokens", "stop", "structure"))

    def choose_temperature(self, default: float) -> float:
        """The temperature, or that of the recipe; several greedy attempts at a task are refused."""
        temperature = default if self.temperature is None else self.temperature
        if not temperature and self.samples is not None and self.samples > 1:
            raise ConfigError(
                f"temperature=0 makes {self.samples} greedy attempts at a task, all of them the same; give a "
                "temperature, or samples=1"
            )
        return temperature
