"""The episodes of one step, as they reach the learner."""

from __future__ import annotations

from dataclasses import dataclass, field

from graft.types import Episode


@dataclass(slots=True)
class StepRollouts:
    """The episodes of a step, and how they were collected."""

    episodes: list[Episode]
    set_aside: int = 0
    """Flat groups that dynamic sampling replaced."""
    seconds: float = 0.0
    """The time that the step waited for them; 0: not known."""
    cursor: int = 0
    """The place in the task stream after them."""
    is_async: bool = False
    """Whether they were collected while other steps learned."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Metrics of the collector, the engine, and the environments of a mix."""
