"""What led an env to where it is: enough to be there again after its process is gone.

    reset -> seed 5, turns "a", "b"     bring_back: reset(5), step("a"), step("b")

An env is fixed by its seed and the actions it was given, so one that shared a process with an env
that crashed goes on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graft.envs.vector.jobs import SlotJob
from graft.envs.vector.slot import EnvSlot, SlotState
from graft.types import Turn

GONE = "RuntimeError: the process of this env ended, and its episode with it"


@dataclass
class Past:
    """Of one seat. The near side of a process vector writes it, the far side reads it."""

    standing: SlotState
    seed: int | None = None
    """Of the running episode; None: the env did not tell it."""
    state: Mapping[str, Any] | None = None
    """Where the actions begin, if not with a reset."""
    actions: list[str] = field(default_factory=list[str])

    def note(self, job: SlotJob, result: Any, standing: SlotState | None) -> None:
        """Add what a job did. `standing` is None if it left the seat as it was."""
        if standing is None:
            if job.do == "step":
                self.actions.append(job.arguments[0])
            return
        self.standing = standing
        if job.do == "set_state":
            self.state, self.actions = job.arguments[0], []
        elif standing.manner == "step":  # reset, by name or after an end
            info = result.info if isinstance(result, Turn) else result[1]
            given = job.arguments[0] if job.do == "reset" else None
            self.seed, self.state, self.actions = info.get("seed", given), None, []
        elif standing.has_env and job.do == "step":  # over, and not reset yet
            self.actions.append(job.arguments[0])
        else:
            self.actions = []

    def bring_back(self, seat: EnvSlot, mark: Callable[[], None]) -> None:
        """Lead a new seat to this point; `mark` is called before each turn."""
        seat.stand(self.standing)
        if not self.standing.has_env:
            return
        if self.state is not None:
            seat.set_state(self.state)
        elif self.seed is not None:
            seat.reset(self.seed)
        else:
            if self.standing.manner == "step":
                seat.lose(GONE)
            else:
                seat.fail(GONE)  # over anyway; only the seed of the next episode is to be found
            return
        for action in self.actions:
            mark()
            seat.step(action)
        if seat.standing.manner != self.standing.manner:
            seat.lose(GONE)  # it does not do the same twice
        else:
            seat.seed, seat.faults = self.standing.seed, self.standing.faults
