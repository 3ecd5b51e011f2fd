"""A context that belongs to one of several servers, which is chosen by how many contexts each has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from graft.engine.remote.stateless import StatelessBackend, StatelessContext


class CountsContexts(Protocol):
    num_contexts: int


S = TypeVar("S", bound=CountsContexts)


class ServerContext(StatelessContext, Generic[S]):
    """A context that stays on one server while that works, as do its forks: the prefix cache is there."""

    def __init__(
        self, engine: StatelessBackend, tokens: Sequence[int], key: int, server: S
    ) -> None:
        super().__init__(engine, tokens, key)
        self.server = server
        server.num_contexts += 1

    def move(self, server: S) -> None:
        self.server.num_contexts -= 1
        self.server = server
        server.num_contexts += 1

    def close(self) -> None:
        if self._is_open:
            self.server.num_contexts -= 1
        super().close()

    def _copy(self, tokens: list[int], key: int) -> ServerContext[S]:
        return type(self)(self.engine, tokens, key, self.server)
