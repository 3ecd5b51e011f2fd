"""What every vector of envs offers, serial or threaded.

    vec.reset(seed=0)           env i starts with seed 0 + i
    vec.step(["a", "b", "c"])   all of them, five columns back
    vec.step({2: "c", 0: "a"})  these two, in this order
    vec.send({1: "b"})          do not wait; recv() gives results as they come

A subclass carries requests to the envs: `_submit` starts them, `_collect` waits for results.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from graft.envs.random_state import checked_seed
from graft.envs.vector.slot import EnvFailure, EnvSlot, SlotRequest
from graft.protocols import Observation
from graft.types import Turn

DEFAULT_TIMEOUT = 600.0
"""Seconds that a reset or step may take where the caller sets no timeout."""

POLL_SECONDS = 0.2
"""Longest single wait: a request that another thread sends meanwhile has a deadline too."""

Columns = tuple[
    list[Observation],
    "np.ndarray[Any, np.dtype[np.float64]]",
    "np.ndarray[Any, np.dtype[np.bool_]]",
    "np.ndarray[Any, np.dtype[np.bool_]]",
    list[dict[str, Any]],
]
"""observations, rewards, terminated, truncated, infos; one row per env that was stepped."""


class VectorEnv:
    """Many envs behind one reset and step; a fault in one of them does not reach the others.

    An env that raises, or takes longer than `timeout`, answers truncated with `info["error"]`, and
    is rebuilt for its next episode. Infos of an autoreset in the same step hold
    "final_observation" and "final_info" of the episode that ended.
    """

    def __init__(self, slots: Sequence[EnvSlot], timeout: float | None = None) -> None:
        self.slots = list(slots)
        self.env_ids = [slot.spec.env_id for slot in slots]
        self.num_envs = len(slots)
        self.autoreset = slots[0].autoreset
        self.timeout = DEFAULT_TIMEOUT if timeout is None else timeout
        self.is_started = False  # reset() was called
        self.is_closed = False
        self.pending: dict[int, str] = {}  # index -> method of the unanswered request

    def __len__(self) -> int:
        return self.num_envs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, requests: Mapping[int, SlotRequest]) -> None:
        """Start requests, at most one per slot at a time, without waiting for them."""
        raise NotImplementedError(f"{type(self).__name__} must write _submit()")

    def _collect(self, seconds: float) -> list[tuple[int, Any]]:
        """Results so far; if there are none, wait up to `seconds` for the first."""
        raise NotImplementedError(f"{type(self).__name__} must write _collect()")

    def _shut(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must write _shut()")

    @property
    def envs(self) -> list[Any]:
        return [slot.env for slot in self.slots]

    def fork(self) -> Self:
        """An independent copy of all envs in their present state."""
        self._check_idle()
        twin = type(self)([slot.fork() for slot in self.slots], self.timeout)
        twin.is_started = self.is_started
        return twin

    def reset(
        self, seed: int | Sequence[int | None] | None = None, *, only: Iterable[int] | None = None
    ) -> tuple[list[Observation], list[dict[str, Any]]]:
        """Begin an episode in every env, or in those of `only`, in that order.

        A number is the seed of env 0, the next one that of env 1, and so on; a list has one entry
        per env that is reset. Without seeds the first reset takes the ones of `make_vec`, a later
        one goes on to the next episode of each env.
        """
        self._check_idle()
        which = range(self.num_envs) if only is None else self._indices(only)
        if seed is None:
            seeds: list[int | None] = [None] * len(which)
        elif isinstance(seed, Sequence):
            seeds = [None if one is None else checked_seed(one) for one in seed]
        else:
            seeds = [checked_seed(seed) + index for index in which]
        if len(seeds) != len(which):
            raise ValueError(f"{len(seeds)} seeds for {len(which)} envs; give one per env")
        if only is None:
            self.is_started = True
        elif not self.is_started:
            raise RuntimeError("reset all envs once before resetting some of them")
        requests = {i: SlotRequest("reset", (one,)) for i, one in zip(which, seeds, strict=True)}
        results = self._all(requests)
        return [result[0] for result in results], [result[1] for result in results]

    def step(self, actions: Sequence[str] | Mapping[int, str]) -> Columns:
        """Step all envs with a list, or some with {index: action}; wait for all of them."""
        actions = self._checked(actions)
        chosen = actions if isinstance(actions, Mapping) else dict(enumerate(actions))
        return in_columns(
            self._all({i: SlotRequest("step", (action,)) for i, action in chosen.items()})
        )

    def send(self, actions: Mapping[int, str]) -> None:
        """Start steps and return. Each env takes one action at a time."""
        self._check_started()
        for index in self._indices(actions):
            if index in self.pending:
                raise ValueError(f"env {index} has not answered its last action; recv() first")
        self._begin({index: SlotRequest("step", (action,)) for index, action in actions.items()})

    def recv(self, timeout: float | None = None) -> list[tuple[int, Turn]]:
        """Results of `send` as they come: at least one, unless none comes in `timeout` seconds."""
        self._check_open()
        if not self.pending:
            raise RuntimeError("nothing was sent, so nothing can be received; send() first")
        ends = time.monotonic() + (2 * self.timeout if timeout is None else timeout)
        while not (done := self._finish(max(0.0, min(POLL_SECONDS, ends - time.monotonic())))):
            if time.monotonic() >= ends:
                break
        return done

    async def stream(
        self, policy: Callable[[int, Observation, dict[str, Any]], Any]
    ) -> AsyncIterator[tuple[int, Turn]]:
        """Play all envs at once, each at its own pace: `async for index, turn in stream(policy)`.

        `policy(index, observation, info)` gives the next action of one env, or is a coroutine that
        does. No env waits for another. With autoreset "off" the stream ends when every episode
        has; otherwise the caller breaks out of it, and unfinished steps are dropped.
        """
        observations, infos = await asyncio.to_thread(self.reset)
        thinking: dict[asyncio.Task[str], int] = {}
        receiving: asyncio.Task[list[tuple[int, Turn]]] | None = None

        async def think(index: int, observation: Observation, info: dict[str, Any]) -> str:
            action = policy(index, observation, info)
            return await action if inspect.isawaitable(action) else action

        def request_action(index: int, observation: Observation, info: dict[str, Any]) -> None:
            thinking[asyncio.create_task(think(index, observation, info))] = index

        for index, (observation, info) in enumerate(zip(observations, infos, strict=True)):
            request_action(index, observation, info)
        try:
            while thinking or self.pending:
                if self.pending and receiving is None:
                    receiving = asyncio.create_task(asyncio.to_thread(self.recv, POLL_SECONDS))
                tasks = [*thinking, *([receiving] if receiving else [])]
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                actions = {thinking.pop(task): task.result() for task in done if task in thinking}  # pyright: ignore
                if actions:
                    self.send(actions)
                if receiving is None or not receiving.done():
                    continue
                received, receiving = receiving.result(), None
                for index, turn in received:
                    yield index, turn
                    if not turn.is_over or self.autoreset == "same_step":
                        request_action(index, turn.observation, turn.info)
                    elif self.autoreset == "next_step":
                        self.send({index: ""})  # the restart ignores its action
        finally:
            for task in thinking:
                task.cancel()
            if receiving is not None:
                await asyncio.wait([receiving])
            await asyncio.to_thread(self.drain)

    def drain(self) -> list[tuple[int, Turn]]:
        """Wait for everything that was sent."""
        done: list[tuple[int, Turn]] = []
        while self.pending and not self.is_closed:
            done += self.recv()
        return done

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """A method of each env (`vec.call("sample_random_action")`) or an attribute of each."""
        self._check_idle()
        return self._all({i: SlotRequest("call", (name, arguments)) for i in range(self.num_envs)})

    def get_state(self) -> list[dict[str, Any]]:
        """A snapshot per env, plain data; `set_state` of a vector built alike goes on from it."""
        self._check_idle()
        return self._all({index: SlotRequest("get_state") for index in range(self.num_envs)})

    def set_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._check_idle()
        if len(states) != self.num_envs:
            raise ValueError(f"{len(states)} states for {self.num_envs} envs")
        self._all({i: SlotRequest("set_state", (state,)) for i, state in enumerate(states)})
        self.is_started = True

    def close(self) -> None:
        """Close every env and end its thread. A closed vector stays closed."""
        if not self.is_closed:
            self.is_closed = True
            self._shut()

    def _begin(self, requests: Mapping[int, SlotRequest]) -> None:
        self.pending.update({index: request.method for index, request in requests.items()})
        self._submit(requests)

    def _finish(self, seconds: float) -> list[tuple[int, Any]]:
        done = self._collect(seconds)
        for index, _ in done:
            del self.pending[index]
        return done

    def _all(self, requests: Mapping[int, SlotRequest]) -> list[Any]:
        """Results of all requests, in their order. `_collect` enforces their deadlines."""
        self._begin(requests)
        results: dict[int, Any] = {}
        while len(results) < len(requests):
            results.update(self._finish(POLL_SECONDS))
        for index in requests:  # not in the order of arrival: the message must not depend on it
            if isinstance(results[index], EnvFailure):
                error = results[index].error
                raise RuntimeError(f"env {index} ({self.env_ids[index]!r}): {error}")
        return [results[index] for index in requests]

    def _checked(
        self, actions: Sequence[str] | Mapping[int, str]
    ) -> Sequence[str] | Mapping[int, str]:
        self._check_started()
        if self.pending:
            self._check_idle()
        if not isinstance(actions, list) and isinstance(actions, Mapping):
            self._indices(actions)
        elif isinstance(actions, str) or len(actions) != self.num_envs:
            seen = "a text" if isinstance(actions, str) else f"{len(actions)} actions"
            raise ValueError(
                f"step got {seen}; give a list of {self.num_envs} actions or {{index: action}}"
            )
        return actions

    def _indices(self, which: Iterable[int]) -> list[int]:
        chosen = list(which)
        for index in chosen:
            if not 0 <= index < self.num_envs:
                raise ValueError(f"env {index!r}: must be one of 0 to {self.num_envs - 1}")
        if len(set(chosen)) != len(chosen):
            raise ValueError(f"envs {chosen}: one of them is given twice")
        return chosen

    def _check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("this vector is closed; make a new one")

    def _check_started(self) -> None:
        self._check_open()
        if not self.is_started:
            raise RuntimeError("no episodes are running; call reset() first")

    def _check_idle(self) -> None:
        self._check_open()
        if self.pending:
            raise RuntimeError(f"envs {sorted(self.pending)} have not answered yet; recv() first")


def in_columns(turns: Sequence[Turn]) -> Columns:
    """[Turn("a", 1.0), Turn("b")] -> ["a", "b"], [1.0, 0.0], [False, False], ..., [{}, {}]."""
    if not turns:
        return [], np.zeros(0), np.zeros(0, np.bool_), np.zeros(0, np.bool_), []
    observations, rewards, terminated, truncated, infos = zip(*turns, strict=True)
    count = len(turns)
    return (
        list(observations),
        np.fromiter(rewards, np.float64, count),  # half the time of np.array
        np.fromiter(terminated, np.bool_, count),
        np.fromiter(truncated, np.bool_, count),
        list(infos),
    )
