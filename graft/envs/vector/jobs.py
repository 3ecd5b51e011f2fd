"""What is asked of a seat, in plain data: a job may have to travel to another thread or process."""

from __future__ import annotations

from typing import Any, NamedTuple

from graft.envs.vector.slot import FAULTS, EnvSlot, describe
from graft.types import Turn


class EnvFailure(NamedTuple):
    """The result of a `call` that raised; steps and resets say it in their info."""

    error: str


class SlotJob(NamedTuple):
    """One thing to do at one seat, in plain data: it may have to travel."""

    do: str
    """A method of Seat: "reset", "step", "recover", "call", "get_state", "set_state"."""
    arguments: tuple[Any, ...] = ()

    def run(self, seat: EnvSlot) -> Any:
        try:
            return getattr(seat, self.do)(*self.arguments)
        except FAULTS as fault:  # of a call: resets and steps keep theirs to themselves
            return EnvFailure(describe(fault))

    def run_apart(self, seat: EnvSlot) -> Any:
        """The same on a thread or in a process that is the env's alone.

        No Ctrl-C of a person arrives there: whatever is thrown, the env threw it.
        """
        try:
            return self.run(seat)
        except BaseException as fault:
            if self.do in ("step", "recover"):
                return seat.recover(describe(fault))
            if self.do == "reset":
                return seat.fail_reset(fault)
            return EnvFailure(describe(fault))


def late_text(index: int, env_id: str, job: SlotJob, seconds: float) -> str:
    return f"TimeoutError: env {index} ({env_id!r}) took more than {seconds:g} s for a {job.do}"


def lost(job: SlotJob, error: str) -> Any:
    """What a job gives that nobody will ever answer."""
    if job.do == "reset":
        return "", {"error": error}
    if job.do in ("step", "recover"):
        return Turn("", truncated=True, info={"error": error})
    return EnvFailure(error)
