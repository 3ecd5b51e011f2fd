"""A turn of the policy in progress: what was sampled, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from graft.types import Finish, Span


class TurnStage(StrEnum):
    """How far a turn of the policy has come."""

    SAMPLING = "sampling"
    """Its first tokens are there, and more may follow."""
    SAMPLED = "sampled"
    """Complete; the environment does not know of it yet."""
    ACTING = "acting"
    """The environment computes its answer."""
    OVER = "over"
    """The environment has answered, or the attempt has ended. Before the first turn too."""


@dataclass(slots=True)
class PartialTurn:
    """A turn of the policy in progress, or the last one.

    begin(4)               ["So c"]                        SAMPLING
    new weights, turn()    ["So c", "ompare A and B"]      SAMPLED     a span per version
    env.step               the same                        ACTING, then OVER
    """

    spans: list[Span] = field(default_factory=list[Span])
    mode: int | None = None
    """Of the context before the first token."""
    stage: TurnStage = TurnStage.OVER
    finish: Finish | None = None
    """Why sampling ended; None: it has not."""

    @property
    def is_open(self) -> bool:
        """Whether the environment still waits for it."""
        return self.stage in (TurnStage.SAMPLING, TurnStage.SAMPLED)

    @property
    def tokens(self) -> list[int]:
        return [token for span in self.spans for token in span.tokens]
