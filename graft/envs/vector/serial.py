"""A vector that steps its envs one after the other, in the caller's thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graft.envs.vector.base import Columns, VectorEnv, in_columns
from graft.envs.vector.jobs import SlotJob
from graft.envs.vector.slot import FAULTS, EnvSlot
from graft.types import Turn


class SerialVector(VectorEnv):
    """The cheapest vector where envs compute; nothing can interrupt an env that hangs."""

    def __init__(self, seats: Sequence[EnvSlot]) -> None:
        super().__init__([seat.recipe for seat in seats], seats[0].autoreset)
        self.seats = list(seats)
        self._done: list[tuple[int, Any]] = []

    @property
    def envs(self) -> list[Any]:
        return [seat.env for seat in self.seats]

    def step(self, actions: Sequence[str] | Mapping[int, str]) -> Columns:
        # the same as in the base class, without its messengers: this loop is all that 64 small
        # envs have in common, and they feel every call in it
        actions = self._checked(actions)
        if not isinstance(actions, list) and isinstance(actions, Mapping):
            seats, actions = [self.seats[index] for index in actions], list(actions.values())
        else:
            seats = self.seats
        turns: list[Turn] = []
        keep = turns.append
        for seat, action in zip(seats, actions, strict=True):
            try:
                turn = seat.act(action)
                if turn[2] or turn[3]:
                    turn = seat.end(turn)
            except FAULTS as fault:
                turn = seat.end(seat.fail(fault))
            keep(turn)
        return in_columns(turns)

    def fork(self) -> SerialVector:
        self._check_idle()
        twin = SerialVector([seat.fork() for seat in self.seats])
        twin.is_started = self.is_started
        return twin

    def _submit(self, jobs: Mapping[int, SlotJob]) -> None:
        for index, job in jobs.items():
            self._done.append((index, job.run(self.seats[index])))

    def _collect(self, seconds: float) -> list[tuple[int, Any]]:
        done, self._done = self._done, []
        return done

    def _shut(self) -> None:
        for seat in self.seats:
            seat.close()
