"""Attempts that agents started elsewhere make: `task.agent: external`.

A step offers its attempts; POST /graft/sessions claims the next one, and its answer has the task, or brings a
task of its own, which then takes the place of the step's task for its whole group (tasks with the same id are
one group). POST .../end completes the attempt. When all attempts of a step have ended, the step is trained,
and the next one is offered with the new weights:

    a step of 2 tasks x 2 attempts    claim -> task 0    claim -> task 0
                                      claim {"id": "mine"} -> task 1 is now "mine"
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graft.gateway.client import AgentClient
from graft.gateway.programs import Outcome
from graft.gateway.request import RefusedRequest
from graft.gateway.session import AgentSession
from graft.rollout.failure import RolloutFailure
from graft.types import Status, Task

CLAIM_SECONDS = 600.0
"""That a client waits for an attempt to claim, as while a step is trained."""


@dataclass(slots=True, eq=False)
class OfferedAttempt:
    """One attempt of a step, on its way from the offer to its end."""

    session: AgentSession
    claimed: asyncio.Future[None]
    ended: asyncio.Future[Status]


@dataclass(slots=True)
class ExternalAgents:
    """The program of such attempts, and the source of their sessions.

    seconds      from the claim of an attempt to its end
    is_graded    whether task.reward grades tasks that clients bring
    """

    seconds: float = 1800.0
    is_graded: bool = False
    concurrency: int = 1_000_000
    """Every attempt of a step may be claimed at once."""
    _offers: dict[AgentSession, OfferedAttempt] = field(default_factory=dict)
    _own: set[str] = field(default_factory=set)
    """Ids of forests' tasks that a client brought."""
    _waiting: list[asyncio.Future[None]] = field(default_factory=list)
    """Clients that wait for an offer."""
    _is_paused: bool = False

    async def __call__(self, task: Task, client: AgentClient) -> Outcome:
        loop, session = asyncio.get_running_loop(), client.attempt
        offer = OfferedAttempt(session, loop.create_future(), loop.create_future())
        self._offers[session] = offer
        self._is_paused = False
        self._wake()
        try:
            await offer.claimed
            async with asyncio.timeout(self.seconds):
                status = await offer.ended
        except TimeoutError:
            raise RolloutFailure(
                Status.TIMEOUT, f"the session was not ended in {self.seconds:g} s (agent.seconds)"
            ) from None
        finally:
            self._offers.pop(session, None)
        if status not in (Status.DONE, Status.TRUNCATED):
            raise RolloutFailure(status, f"the client ended the session with status {status}")
        return Outcome(None, {"metadata": dict(session.metadata)} if session.metadata else {})

    async def open(self, task: Task | None, metadata: Mapping[str, Any]) -> AgentSession:
        """Claim an attempt."""
        loop = asyncio.get_running_loop()
        until = loop.time() + CLAIM_SECONDS
        while (offer := self._free(task)) is None:
            if self._is_paused:
                raise RefusedRequest(
                    "the attempts of this step are complete, and it is being trained; ask again",
                    "overloaded",
                )
            news = loop.create_future()
            self._waiting.append(news)
            try:
                async with asyncio.timeout_at(until):
                    await news
            except TimeoutError:
                raise RefusedRequest(
                    f"no attempt was free for {CLAIM_SECONDS:g} s: all of this step are claimed, or the run "
                    "is over; end sessions, or ask again",
                    "overloaded",
                ) from None
        if task is not None and offer.session.forest.task.id != task.id:
            offer.session.forest.task = task
            self._own.add(task.id)
        offer.session.metadata = metadata
        offer.claimed.set_result(None)
        return offer.session

    def release(self) -> None:
        """The server stops for a while: the step is complete, and the learner has the processor."""
        self._is_paused = True
        self._wake()

    def _wake(self) -> None:
        """Let clients that wait look again."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    def _free(self, task: Task | None) -> OfferedAttempt | None:
        """An attempt to claim: one of the group of this task, else one whose group nobody has begun."""
        free = [one for one in self._offers.values() if not one.claimed.done()]
        if task is None:
            own = [one for one in free if one.session.forest.task.id not in self._own]
            return own[0] if own else None
        same = [one for one in free if one.session.forest.task.id == task.id]
        begun = {id(one.session.forest) for one in self._offers.values() if one.claimed.done()}
        ended = {id(one.session.forest) for one in free if one.session.forest.leaves}
        fresh = [one for one in free if id(one.session.forest) not in begun | ended]
        return next(iter([*same, *fresh]), None)

    async def end(self, session: AgentSession, status: Status) -> Status:
        offer = self._offers.get(session)
        if offer is None or not offer.claimed.done():
            raise RefusedRequest("this session has ended, or was never claimed", "not_found")
        is_own = session.forest.task.id in self._own
        if is_own and status.is_trainable and not (session.is_rewarded or self.is_graded):
            raise RefusedRequest(
                f"the task {session.forest.task.id!r} is your own, so nothing here can grade it: POST "
                '.../reward first, or end with {"reward": x}',
                param="reward",
            )
        if not offer.ended.done():
            offer.ended.set_result(status)
        return session.status_at_end(status)[0]
