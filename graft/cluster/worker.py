"""A Ray worker as the collector sees it: its stage, its pending calls, the attempts it runs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from graft.deadlines import clock, waiting
from graft.rollout.collector import RolloutRequest
from graft.types import Episode, Task

PING_EVERY = 2.0
"""Seconds between two pings of a worker."""


@dataclass(slots=True, eq=False)
class WorkerAttempt:
    """One task of a request, from the queue to its episode."""

    task: Task
    request: RolloutRequest
    """The request without its tasks, since it is sent with each of them."""
    index: int
    """Of the task in the whole request."""
    episode: Future[Episode] = field(default_factory=Future[Episode])
    num_deaths: int = 0
    """Workers that died during this attempt."""


class PendingAttempts:
    """The attempts of one request."""

    def __init__(self, attempts: Sequence[WorkerAttempt], name: str) -> None:
        self.attempts, self.name = attempts, name

    def result(self) -> list[Episode]:
        with waiting(self.name):
            return [attempt.episode.result() for attempt in self.attempts]

    def is_done(self) -> bool:
        return all(attempt.episode.done() for attempt in self.attempts)


class WorkerStage(IntEnum):
    """Stage of a worker: being placed by Ray, building its engine, loading the weights."""

    PLACING = 0
    STARTING = 1
    LOADING = 2
    READY = 3


@dataclass(slots=True, eq=False)
class ClusterWorker:
    number: int
    actor: Any
    transition: Any
    """The pending call that leads to the next stage; None when ready."""
    stage: WorkerStage = WorkerStage.PLACING
    process: str = ""
    """Its pid and machine, once it is placed."""
    running: dict[Any, WorkerAttempt] = field(default_factory=dict[Any, WorkerAttempt])
    """Pending call -> attempt."""
    num_done: int = 0
    weights: Any = None
    """The weights that were sent to a starting worker."""
    ping: Any = None
    created_at: float = field(default_factory=time.monotonic)
    pinged_at: float = math.inf
    """Time of the oldest unanswered ping, or of the call that starts it."""
    answered_at: float = 0.0
    is_retired: bool = False
    """Gets no more tasks, and ends when its tasks are done."""

    def __str__(self) -> str:
        return f"worker {self.number} ({self.process})" if self.process else f"worker {self.number}"

    @property
    def is_ready(self) -> bool:
        return self.stage is WorkerStage.READY and not self.is_retired

    @property
    def pending_calls(self) -> list[Any]:
        return [*self.running, *(one for one in (self.ping, self.transition) if one is not None)]

    def silence(self, now: float) -> float:
        """Seconds since its oldest unanswered ping."""
        return now - max(self.pinged_at, self.answered_at) if self.pinged_at < math.inf else 0.0

    def describe(self, now: float) -> str:
        """What it does: "has 3 episodes in progress"."""
        if self.stage is not WorkerStage.READY:
            activity = ("waits to be placed", "starts", "takes the weights")[self.stage]
            return f"{activity}, since {clock(now - self.created_at)}"
        count = len(self.running)
        silence = self.silence(now)
        late = f" and has not answered since {clock(silence)}" if silence > 2 * PING_EVERY else ""
        return f"has {count} episode{'s'[: count != 1]} in progress{late}"
