"""One native engine in several processes: the first sends the calls on its contexts, the others repeat them.

    the first process            the others
    rollouts call the contexts   wait
    the loop begins a step  ---> sync: make the same calls on contexts of the same numbers
    plan, run, hand over         plan, run, hand over: the same, for queues and draws are the same
    callers go on           ---> sync: what they did meanwhile
    release                 ---> the collection is over

Callers run only while the engine's loop waits, so calls between two steps come in one message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graft.engine.engine_group import EngineGroup
from graft.engine.errors import EngineError
from graft.protocols import Grammar

STEP, NOW, RELEASE = "step", "now", "release"
"""Kinds of messages: then a step follows; only these calls; no further message."""

Call = tuple[str, tuple[Any, ...]]


class CallMirror:
    """The calls of one process, or those that it repeats.

    `apply` makes a call on this process's engine: its name, and its arguments.
    """

    def __init__(self, group: EngineGroup, apply: Callable[..., None]) -> None:
        self.group, self._apply = group, apply
        self._calls: list[Call] = []
        self._grammars: list[Grammar] = []
        self._drawn = 0  # a sum over all drawn tokens, the same in every process

    def record(self, name: str, *args: Any) -> None:
        """A call that was made here and is to be repeated."""
        if self.group.is_first:
            self._calls.append((name, args))

    def grammar_number(self, grammar: Grammar | None) -> int | None:
        """The number of a grammar, which is sent once."""
        if grammar is None:
            return None
        for number, known in enumerate(self._grammars):
            if known is grammar:
                return number
        self._grammars.append(grammar)
        self.record("grammar", grammar)
        return len(self._grammars) - 1

    def grammar(self, number: int | None) -> Grammar | None:
        return None if number is None else self._grammars[number]

    def add_grammar(self, grammar: Grammar) -> None:
        self._grammars.append(grammar)

    def count(self, actions: list[int]) -> None:
        """Remember what was drawn, to be compared with the next message."""
        for action in actions:
            self._drawn = (self._drawn * 31 + action) % 2**61

    def sync(self) -> bool:
        """Share the calls before a step. False: the first process has released the others."""
        if self.group.is_first:
            self._send(STEP)
            return True
        while True:
            kind, drawn, calls = self.group.receive()
            if drawn != self._drawn:
                raise EngineError(
                    f"process {self.group.index} of an engine has drawn other tokens than the first one; "
                    "they need the same kind of device and the same versions of torch and graft"
                )
            for name, args in calls:
                self._apply(name, *args)
            if kind != NOW:
                return kind == STEP

    def flush(self) -> None:
        """Send the calls so far; the last one is computed together."""
        self._send(NOW)

    def release(self) -> None:
        self._send(RELEASE)

    def _send(self, kind: str) -> None:
        self.group.send((kind, self._drawn, self._calls))
        self._calls = []
