"""The far side of a process vector: a process that holds seats and does jobs in bundles.

The near side starts it with a connection, a lifeline (a pipe that breaks when the near side dies)
and a board, a few shared bytes that say which seat is being worked on and since when. From the
board the near side learns who hangs, or who took the process down.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import pickle
import select
import signal
import struct
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from graft.envs.catalogue import EnvEntry
from graft.envs.vector.jobs import EnvFailure, SlotJob, lost
from graft.envs.vector.past import Past
from graft.envs.vector.slot import FAULTS, Autoreset, EnvSlot, EnvSpec, SlotState, describe

BOARD_SIZE = 16
NOBODY = -1

Bundle = list[tuple[int, "SlotOpening | SlotJob"]]
"""What one message asks for: seats by their index, and what to do there."""

Answer = tuple[int, Any, SlotState | None]
"""Index, result, and how the seat stands now if that has changed."""


class SlotOpening(NamedTuple):
    """A seat to set up: from its recipe alone, or brought back to the middle of an episode."""

    recipe: EnvSpec
    entry: EnvEntry
    """The table's line behind the id: what the user registered is known to the near side only."""
    autoreset: Autoreset
    past: Past | None = None


class WorkerSlots:
    """Who is being worked on, and since when (monotonic clock, the same in all processes)."""

    def __init__(self, file: int) -> None:
        self.memory = mmap.mmap(file, BOARD_SIZE)

    def write(self, index: int) -> None:
        # time first: a reader between the two sees a young start, never somebody else's old one
        struct.pack_into("d", self.memory, 8, time.monotonic())
        struct.pack_into("q", self.memory, 0, index)

    def read(self) -> tuple[int, float]:
        index, since = struct.unpack_from("qd", self.memory)
        return index, since


def main(connection: int, board: int, lifeline: int, parent: int) -> None:
    die_with(parent, lifeline)
    work(Connection(connection), WorkerSlots(board))


def work(connection: Connection, board: WorkerSlots) -> None:
    """Answer bundles until an empty one comes."""
    seats: dict[int, EnvSlot] = {}
    while bundle := receive(connection):
        answers: list[Answer] = []
        for index, task in bundle:
            board.write(index)
            if isinstance(task, SlotOpening):
                seats[index] = EnvSlot(task.recipe, task.autoreset)
                answers.append((index, set_up(seats[index], index, task, board), None))
                continue
            seat = seats[index]
            before = seat.act
            result = task.run_apart(seat)
            # an ordinary step leaves `act` as it was; a reset puts another function there
            answers.append((index, result, None if seat.act is before else seat.standing))
        board.write(NOBODY)
        connection.send_bytes(pack(answers, dict(bundle), seats))
    for seat in seats.values():
        seat.close()


def receive(connection: Connection) -> Bundle:
    try:
        return pickle.loads(connection.recv_bytes())
    except EOFError:
        return []


def set_up(
    seat: EnvSlot, index: int, opening: SlotOpening, board: WorkerSlots
) -> EnvFailure | None:
    from graft.envs import ENVS  # that package imports this one

    ENVS.setdefault(seat.recipe.env_id, opening.entry)
    try:
        if opening.past is None:
            seat.open()
        else:
            opening.past.bring_back(seat, lambda: board.write(index))
    except FAULTS as fault:
        seat.lose(describe(fault))
        return EnvFailure(describe(fault))
    return None


def pack(answers: list[Answer], tasks: dict[int, Any], seats: dict[int, EnvSlot]) -> bytes:
    """The answers as bytes. What cannot be pickled is the fault of the env that gave it."""
    try:
        return pickle.dumps(answers, pickle.HIGHEST_PROTOCOL)
    except FAULTS:
        sound: list[Answer] = []
        for index, result, standing in answers:
            try:
                pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
            except FAULTS as fault:
                error = f"cannot leave its process: {describe(fault)}"
                seats[index] = heir = seats[index].successor()
                is_step = tasks[index].do == "step"
                result = heir.recover(error) if is_step else lost(tasks[index], error)
                standing = heir.standing
            sound.append((index, result, standing))
        return pickle.dumps(sound, pickle.HIGHEST_PROTOCOL)


def die_with(parent: int, lifeline: int) -> None:
    """End this process when the near side is gone, whatever it is at."""
    if sys.platform == "linux":
        # SIGIO, unhandled, ends it even within a C function that lets no thread of Python run
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)

    def watch() -> None:
        # once a second, because a child of the near side may hold the pipe open after its death
        while os.getppid() == parent and not select.select([lifeline], [], [], 1.0)[0]:
            pass
        os._exit(1)

    threading.Thread(target=watch, name="graft-lifeline", daemon=True).start()
