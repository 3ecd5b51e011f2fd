"""Calls into environments and rewards: on a thread where they block, checked, and within the deadline."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from queue import SimpleQueue
from typing import Any

from graft.envs.checked import as_reset, as_turn, check_fork
from graft.envs.plain import plain
from graft.protocols import AgentHost, Env, Reward
from graft.rewards.weighted import WeightedSum
from graft.rollout.failure import boundary, is_attempts_own
from graft.rollout.setup import RolloutSetup
from graft.tools.calling import tool_on
from graft.types import Task, Trajectory, Turn
from graft.user_code import (
    UserCodeError,
    UserObject,
    as_reward,
    clean,
    describe_error,
    naming,
    raised,
    user_frame,
)

MAX_IDLE = 64
"""Threads kept for the next call; starting one takes longer than most calls."""
MAX_OF_ONE, MAX_OF_ALL = 4_096, 16_384
"""Characters of JSON that one entry and all of them may have."""
MAX_NAME, MAX_LEFT_OUT = 80, 64
"""Characters of a name, and names, of entries that are left out."""

log = logging.getLogger("graft")
OF_THE_TASK = ("answer", "tools", "meta", "data_source")
"""Entries of a reset's info that the task holds."""


async def call(env: Env, function: Callable[..., Any], *args: Any) -> Any:
    """Call a method of `env`; environments that are `blocking` run on a thread."""
    return await in_thread(function, *args) if env.blocking else function(*args)


def agent_host(env: Env | None) -> AgentHost | None:
    """The environment itself, without its wrappers, if commands of agents run on its machine."""
    inner = getattr(env, "unwrapped", env)
    return inner if isinstance(inner, AgentHost) else None


def close_env(env: Env) -> None:
    with naming(env, "close() of"):
        env.close()


def try_close(env: Env) -> UserCodeError | None:
    """Close the environment of an attempt that is over; what went wrong, which is logged."""
    error: UserCodeError | None = None
    try:
        close_env(env)
    except UserCodeError as fault:
        error = fault
    except BaseException as fault:  # of a library below it, or an interrupt that is no Ctrl-C
        if not is_attempts_own(fault):
            raise
        error = raised(UserObject(env, "close() of"), fault)
    if error is not None:
        log.warning("%s", error)
    return error


async def fork_env(env: Env, setup: RolloutSetup, task: Task, actions: Sequence[str]) -> Env:
    """A copy of `env`; where it is not forkable, a new one that replays `actions`."""
    if env.forkable:
        async with boundary(f"env {task.env} fork", setup.deadline):
            twin = env.fork()
            check_fork(twin, env)
            return twin
    async with boundary(f"env {task.env} replay", setup.deadline):
        copy = setup.make_env(task)
    try:
        async with boundary(f"env {task.env} replay", setup.deadline):
            as_reset(await call(copy, copy.reset, task.seed), UserObject(copy, "env", "reset"))
    except BaseException:
        try_close(copy)
        raise
    await replay(copy, setup, task, actions)
    return copy


async def replay(env: Env, setup: RolloutSetup, task: Task, actions: Sequence[str]) -> list[Turn]:
    """The turns of `actions` in a fresh `env`; if one fails, the environment is closed."""
    turns: list[Turn] = []
    try:
        async with boundary(f"env {task.env} replay", setup.deadline):
            for action in actions:
                turn = await call(env, env.step, action)
                turns.append(as_turn(turn, UserObject(env, "env", "step")))
                if turns[-1].is_over:
                    raise ValueError(
                        f"turn {len(turns)} ended the episode, which it did not before"
                    )
    except BaseException:
        try_close(env)
        raise
    return turns


async def compute_reward(reward: Reward, task: Task, trajectory: Trajectory) -> float:
    """The reward of an attempt. One that is `blocking`, such as a judge, runs on a thread; the
    blocking components of a sum wait at the same time, the others stay on this thread."""
    if isinstance(reward, WeightedSum):
        values = await asyncio.gather(
            *(compute_reward(one.reward, task, trajectory) for one in reward.components)
        )
        total = reward.total(values, trajectory.leaf)
        return as_reward(total, "the weighted sum of task.reward", verb="is")
    who, is_blocking = UserObject(reward, "reward"), getattr(reward, "blocking", False)
    try:
        value = (
            await in_thread(reward, task, trajectory) if is_blocking else reward(task, trajectory)
        )
    except SystemExit as error:
        raise UserCodeError(
            f"{who} called exit({error.code}) for task {task.id!r}; it must return a finite number"
        ) from error
    except Exception as error:
        if isinstance(error, UserCodeError) or not user_frame(error):
            raise
        raise raised(f"{who}, called for task {task.id!r},", error) from error
    return as_reward(value, who, f"a finite number (task {task.id!r})")


def state_of(env: Env, info: Any) -> str:
    """A hash of the environment's state: of `info["state"]` of its last answer, of any JSON, else of what a
    graft environment knows of itself; "" where neither is there."""
    given = info.get("state") if isinstance(info, Mapping) else None
    key = getattr(env, "state_key", None)
    if given is None and callable(key):
        with naming(env, "state_key() of"):
            given = key()
    if given is None or given == "":
        return ""
    text = given if isinstance(given, str) else json.dumps(plain(given), sort_keys=True)
    return blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()


def last_info(info: Any) -> dict[str, Any]:
    """Entries that are too large, or that JSON cannot hold, are named under "left_out"."""
    kept: dict[str, Any] = {}
    left_out: list[str] = []
    room = MAX_OF_ALL
    try:
        entries = [*info.items()] if isinstance(info, Mapping) else []
    except Exception:  # objects of an environment may raise anything
        entries, left_out = [], ["all"]
    for key, value in entries:
        name, entry, size = "", None, MAX_OF_ALL + 1
        with suppress(Exception):
            name = str(key)
            entry = plain(value)
            size = len(json.dumps({name: entry}, ensure_ascii=False).encode())
        if size <= min(MAX_OF_ONE, room):
            kept[name] = entry
            room -= size
        else:
            left_out.append(clean(name, MAX_NAME))
    del left_out[MAX_LEFT_OUT:]
    return {**kept, "left_out": left_out} if left_out else kept


def info_of_reset(info: Mapping[str, Any]) -> dict[str, Any]:
    """The info of a reset, without the entries that the task holds."""
    return {name: value for name, value in info.items() if name not in OF_THE_TASK}


@dataclass(slots=True)
class BlockingCall:
    """One call. It cannot be killed; `is_given_up` is set when its caller stops waiting."""

    run: Callable[[], None]
    name: str
    is_given_up: bool = False


class ThreadRunner(threading.Thread):
    """Runs calls one after the other, and ends where MAX_IDLE threads are idle already."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.calls: SimpleQueue[BlockingCall] = SimpleQueue()
        self.call: BlockingCall | None = None

    @property
    def is_given_up(self) -> bool:
        """Whether the caller of the present call has stopped waiting."""
        return self.call is not None and self.call.is_given_up

    def run(self) -> None:
        while True:
            self.call = self.calls.get()
            self.name = self.call.name
            self.call.run()
            self.call, self.name = None, "graft-idle"
            if len(_idle) >= MAX_IDLE:
                return
            _idle.append(self)


_idle: deque[ThreadRunner] = deque()  # the last to become idle is used first
os.register_at_fork(after_in_child=_idle.clear)  # threads stay with the parent


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Await `function(*args)` on a daemon thread of its own.

    Not a pool: a call that never returns keeps its worker, 200 of them the whole pool, and closing the
    event loop or leaving the program would wait for it. Here the caller stops waiting at its deadline
    and sets is_given_up (`graft.tools.calling` reads that), and the thread ends with the
    process at the latest.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def deliver(result: Any, error: Exception | None) -> None:
        if future.done():  # the deadline has passed
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = function(*args)
        except BaseException as error:
            failure = _as_failure(error)
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(deliver, result, failure)

    blocking = BlockingCall(run, f"graft-{getattr(function, '__name__', 'call')}")
    try:
        runner = _idle.pop()
    except IndexError:
        runner = ThreadRunner()
        runner.start()
    runner.calls.put(blocking)
    try:
        return await future
    except asyncio.CancelledError as stopped:
        blocking.is_given_up = True
        if tool := tool_on(runner):
            stopped.add_note(f"in tool {tool!r}")  # `boundary` reads it
        raise


def _as_failure(error: BaseException) -> Exception:
    """An exception that a future can carry. SystemExit would end the program that awaits it, and a
    future refuses StopIteration, so that its caller would wait forever."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    failure = RuntimeError(describe_error(error))
    failure.__cause__ = error
    return failure
