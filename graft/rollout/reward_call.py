"""Calls of reward functions: on a thread where they block, and checked."""

from __future__ import annotations

import asyncio

from graft.protocols import Reward
from graft.rewards.weighted import WeightedSum
from graft.rollout.threads import in_thread
from graft.types import Task, Trajectory
from graft.user_code import UserCodeError, UserObject, as_number, raised, user_frame


async def compute_reward(reward: Reward, task: Task, trajectory: Trajectory) -> float:
    """The reward of an attempt. One that is `blocking`, such as a judge, runs on a thread; the
    blocking components of a sum wait at the same time, the others stay on this thread."""
    if isinstance(reward, WeightedSum):
        values = await asyncio.gather(
            *(compute_reward(one.reward, task, trajectory) for one in reward.components)
        )
        return reward.total(values, trajectory.leaf)
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
        raise raised(f"{who}, asked about task {task.id!r},", error) from error
    return as_number(value, who, f"a finite number (task {task.id!r})")
