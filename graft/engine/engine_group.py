"""The processes that hold one engine together: the first one decides, the others repeat its calls.

    process 0 (the first)            process 1
    rollouts sample from the engine  engine.follow()
    group.send(calls)         ---->  group.receive() -> calls, made on its own engine
    a step: its share of heads       the same step: the other heads
    engine.release()          ---->  follow() returns

Each process has the whole state of the engine (queues, pages, random numbers), and a part of the weights
and of the keys and values. The same calls in the same order therefore plan the same steps and draw the
same tokens in all of them, and only the calls are sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from graft.trust.restricted_pickle import dumps, loads

HEADER = 1 << 12
"""Bytes that are always sent: a message that is not longer needs one broadcast."""
LENGTH = 8
"""Bytes of the message's length, at the beginning of the header."""

Result = TypeVar("Result")


class EngineGroup:
    """This process among those of its engine.

    group    their process group; it also sums the parts of a step
    ranks    their ranks in the run
    finish   waits until an operation of the group is complete
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: list[int], finish: Callable[[Any], None]
    ) -> None:
        self.group, self.ranks, self._finish = group, ranks, finish
        self.size, self.index = len(ranks), ranks.index(dist.get_rank())

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def send(self, message: Any) -> None:
        """Send it from the first process to the others, each of which receives it."""
        payload = dumps(message)
        content = len(payload).to_bytes(LENGTH, "little") + payload
        self._broadcast(bytearray(content[:HEADER].ljust(HEADER, b"\0")))
        if len(content) > HEADER:
            self._broadcast(bytearray(content[HEADER:]))

    def receive(self) -> Any:
        content = self._broadcast(bytearray(HEADER))
        end = LENGTH + int.from_bytes(content[:LENGTH], "little")
        if end > HEADER:
            content += self._broadcast(bytearray(end - HEADER))
        return loads(content[LENGTH:end])

    def share(self, value: Any) -> Any:
        """The first process's value, in all of them."""
        if not self.is_first:
            return self.receive()
        self.send(value)
        return value

    def _broadcast(self, content: bytearray) -> bytearray:
        sent = torch.frombuffer(content, dtype=torch.uint8)
        self._finish(dist.broadcast(sent, self.ranks[0], group=self.group, async_op=True))
        return content


def group_of(engine: Any) -> EngineGroup | None:
    """The processes that hold this engine together; None: this one alone."""
    return getattr(engine, "group", None)


def lead(engine: Any, work: Callable[[], Result]) -> Result | None:
    """`work()`, which samples or scores, in the first process of the engine's group.

    The others repeat its calls (`engine.follow`) until it releases them (`engine.release`), and have None.
    """
    group = group_of(engine)
    if group is None:
        return work()
    if group.is_first:
        result = work()
        engine.release()
        return result
    engine.follow()
    return None
