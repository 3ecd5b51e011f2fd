"""Checks of an environment that can try its own tasks: a line for each task, without a recipe or a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

from graft.config import read_arguments
from graft.envs import ENVS, make
from graft.envs.task_check import CheckableTasks, TaskCheck
from graft.train.monitor.check import FAIL, PASS, WARN, Check


def can_check(name: str) -> bool:
    """Whether this is the id of an environment that can try its tasks."""
    return name in ENVS and hasattr(ENVS[name].builder(), "check_tasks")


def task_checks(env_id: str, arguments: Sequence[str]) -> Iterator[Check]:
    """Try every task of an environment with these arguments, such as ["data=tasks"]."""
    with closing(make(env_id, **read_arguments(arguments))) as env:
        tasks = env.unwrapped
        assert isinstance(tasks, CheckableTasks)
        for task in tasks.check_tasks():
            yield as_check(task)


def as_check(task: TaskCheck) -> Check:
    """The line of a task.

    >>> print(as_check(TaskCheck("count", oracle=1.0, nop=0.0)))
    pass  task            count: oracle 1, nop 0
    """
    rewards = f"{task.task}: oracle {_as_text(task.oracle)}, nop {_as_text(task.nop)}"
    data = task._asdict()
    if task.nop is None:
        return Check(
            "task", FAIL, f"{rewards}\n{task.fault}", "repair its machine or its tests", data
        )
    if task.nop > 0:
        return Check("task", FAIL, rewards, "its tests reward doing nothing", data)
    if task.oracle is None:
        return Check(
            "task",
            WARN,
            rewards,
            "it has no solution, so nothing shows that it can be solved",
            data,
        )
    if task.oracle < 1:
        return Check(
            "task", FAIL, f"{rewards}\n{task.fault}", "its own solution does not solve it", data
        )
    return Check("task", PASS, rewards, data=data)


def _as_text(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:g}"
