"""The sessions of an endpoint: opened for attempts, found by their keys, forgotten when they end.

gateway = Gateway(engine, chat, sampling=Sampling(temperature=1.0, max_tokens=512))
session = gateway.open(task)
gateway.find(session.key) is session
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from graft.gateway.forest import CallForest
from graft.gateway.history import RecordedCall
from graft.gateway.policy import ServedPolicy
from graft.gateway.session import AgentSession
from graft.protocols import Engine
from graft.text.chat import Chat
from graft.types import Task


class Gateway:
    """Sessions over one policy; `settings` are those of `ServedPolicy`."""

    session_type: type[AgentSession] = AgentSession

    def __init__(self, engine: Engine, chat: Chat, **settings: Any) -> None:
        self.policy = ServedPolicy(engine, chat, **settings)
        self._sessions: dict[str, AgentSession] = {}
        self._keys: dict[bytes, AgentSession] = {}

    def forest(self, task: Task) -> CallForest:
        """The forest that the sessions of one task share."""
        return CallForest(task, self.policy.engine, self.policy.chat.tokenizer.decode_after)

    def open(
        self,
        task: Task,
        *,
        forest: CallForest | None = None,
        salt: int = 0,
        number: int = 0,
        metadata: Mapping[str, Any] | None = None,
        replay: Sequence[RecordedCall] = (),
        takes_rewards: bool = True,
    ) -> AgentSession:
        """A session for one attempt at a task; without a forest it gets one of its own.

        replay: calls of another attempt that this one repeats before it samples.
        takes_rewards: whether who has its key may give it rewards.
        """
        forest = self.forest(task) if forest is None else forest
        session = self.session_type(
            self.policy,
            task,
            forest,
            salt,
            number,
            metadata,
            replay,
            self._forget,
            takes_rewards,
        )
        self._sessions[session.id] = self._keys[_digest(session.key)] = session
        return session

    @property
    def sessions(self) -> list[AgentSession]:
        """Those that have not ended."""
        return [*self._sessions.values()]

    def get(self, id: str) -> AgentSession | None:
        """The session with this id."""
        return self._sessions.get(id)

    def find(self, key: str) -> AgentSession | None:
        """The session with this key."""
        return self._keys.get(_digest(key))

    def _forget(self, session: AgentSession) -> None:
        self._sessions.pop(session.id, None)
        self._keys.pop(_digest(session.key), None)


def _digest(key: str) -> bytes:
    """Keys are looked up by a hash, so that the time of a search tells nothing about them."""
    return blake2b(key.encode(errors="replace")).digest()
