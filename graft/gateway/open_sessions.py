"""Sessions that clients open and end themselves; those of one task, by its id, are one Episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graft.gateway.forest import CallForest
from graft.gateway.gateway import Gateway
from graft.gateway.session import AgentSession
from graft.rollout.user_calls import last_info
from graft.types import Episode, Leaf, Status, Task


@dataclass(slots=True)
class TaskSessions:
    """The sessions of one task."""

    forest: CallForest
    running: list[AgentSession] = field(default_factory=list[AgentSession])
    count: int = 0
    """Sessions so far."""


class OpenSessions:
    """
    on_change    called with the number of open sessions, before one begins and after one ends
    """

    def __init__(
        self,
        gateway: Gateway,
        salt: int = 0,
        on_change: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.gateway, self.salt, self.on_change = gateway, salt, on_change
        self._groups: dict[str, TaskSessions] = {}
        self._num_tasks = 0
        self.num_running = 0

    async def open(self, task: Task | None, metadata: Mapping[str, Any]) -> AgentSession:
        """A session; without a task it is one of its own."""
        return self.begin(task, metadata)

    def begin(self, task: Task | None, metadata: Mapping[str, Any]) -> AgentSession:
        """`open`, at once."""
        self.on_change(self.num_running + 1)
        if task is None:
            task = Task(f"session:{self._num_tasks}", "gateway")
        self._num_tasks += 1
        group = self._groups.get(task.id)
        if group is None:
            group = self._groups[task.id] = TaskSessions(self.gateway.forest(task))
        session = self.gateway.open(
            group.forest.task,
            forest=group.forest,
            salt=self.salt,
            number=group.count,
            metadata=metadata,
        )
        group.running.append(session)
        group.count += 1
        self.num_running += 1
        return session

    def release(self) -> None:
        """Nothing waits for a session here."""

    async def end(self, session: AgentSession, status: Status) -> Status:
        return self.finish(session, status).status

    def finish(self, session: AgentSession, status: Status = Status.DONE) -> Leaf:
        """`end`, at once."""
        given = {"metadata": session.metadata} if session.metadata else {}
        leaf = session.end(status, last_info(given))
        group = self._groups.get(session.forest.task.id)
        if group is not None and session in group.running:
            group.running.remove(session)
            self.num_running -= 1
            self.on_change(self.num_running)
        return leaf

    def take(self) -> list[Episode]:
        """The Episodes of the tasks whose sessions have all ended; each is given once."""
        done = [id for id, group in self._groups.items() if not group.running]
        return [self._pop(id) for id in done]

    def close(self) -> None:
        """End what still runs."""
        for group in [*self._groups.values()]:
            for session in [*group.running]:
                self.finish(session)

    def _pop(self, id: str) -> Episode:
        group = self._groups.pop(id)
        group.forest.close()
        return group.forest.episode()
