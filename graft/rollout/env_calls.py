"""Calls into environments: on a thread where they block, checked, and within the deadline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graft.protocols import Env
from graft.rollout.failure import boundary
from graft.rollout.setup import RolloutSetup
from graft.rollout.threads import in_thread
from graft.types import Task, Turn
from graft.user_code import UserObject, as_reset, as_turn, check_fork, naming


async def call(env: Env, function: Callable[..., Any], *args: Any) -> Any:
    """Call a method of `env`; environments that are `blocking` run on a thread."""
    return await in_thread(function, *args) if env.blocking else function(*args)


def close_env(env: Env) -> None:
    with naming(env, "close() of"):
        env.close()


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
        copy.close()
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
        env.close()
        raise
    return turns
