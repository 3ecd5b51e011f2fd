"""What a vector asks of one slot, in plain data: it travels to the thread of that slot."""

from __future__ import annotations

from typing import Any, NamedTuple

from graft.envs.vector.slot import FAULTS, EnvSlot, describe
from graft.types import Turn


class EnvFailure(NamedTuple):
    """The result of a `call` that raised; resets and steps report theirs in info["error"]."""

    error: str


class SlotRequest(NamedTuple):
    """One method call on one slot."""

    method: str
    """A method of EnvSlot: "reset", "step", "recover", "call", "get_state", "set_state"."""
    arguments: tuple[Any, ...] = ()

    def run(self, slot: EnvSlot) -> Any:
        try:
            return getattr(slot, self.method)(*self.arguments)
        except FAULTS as fault:  # of a call: resets and steps catch their own
            return EnvFailure(describe(fault))

    def run_in_thread(self, slot: EnvSlot) -> Any:
        """The same on a thread of the env's own, where Ctrl-C never arrives: the env raised it all."""
        try:
            return self.run(slot)
        except BaseException as fault:
            if self.method in ("step", "recover"):
                return slot.recover(describe(fault))
            if self.method == "reset":
                return slot.fail_reset(fault)
            return EnvFailure(describe(fault))

    def failed(self, error: str) -> Any:
        """The result of a request that will never be answered."""
        if self.method == "reset":
            return "", {"error": error}
        if self.method in ("step", "recover"):
            return Turn("", truncated=True, info={"error": error})
        return EnvFailure(error)
