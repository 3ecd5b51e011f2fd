"""What is known about a task that can be tried without a policy: its own solution, and nothing at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable


class TaskCheck(NamedTuple):
    """The rewards of two attempts at a task. A task fit for training has oracle 1 and nop 0."""

    task: str
    oracle: float | None = None
    """Of its author's solution; None: it has none, or no reward."""
    nop: float | None = None
    """Of doing nothing; None: it has no reward."""
    fault: str = ""
    """Why there is no reward, or how the solution ended if it earned less than 1."""


@runtime_checkable
class CheckableTasks(Protocol):
    """An environment that can try each of its tasks."""

    def check_tasks(self) -> Iterator[TaskCheck]: ...
