"""Environments as people hand them over: an id, a class, a function, an instance, or none at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from graft.envs import make
from graft.envs.base import BaseEnv, EnvSource
from graft.protocols import Env
from graft.types import Message, Task, Turn
from graft.user_code import UserCodeError, describe_value

EnvLike = str | Callable[..., Any] | Env
"""An id, a class, a function that builds one, or an instance."""

Prompt = str | Sequence[Message]
"""A text (one user message), or messages."""

MakeEnv = Callable[[Task], Env]


class TaskEnv(BaseEnv):
    """Poses the prompt of a Task and ends with the first answer; the reward comes from outside."""

    env_id = "prompts"

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.given = task

    def pose(self) -> list[Message]:
        self.answer = self.given.answer
        return [dict(message) for message in self.given.prompt]

    def respond(self, action: str) -> Turn:
        return Turn(terminated=True, info={"is_graded": False})


def env_maker(env: EnvLike | None, tokenizer: Any) -> tuple[str, MakeEnv]:
    """The name of an environment, and what builds a fresh one for each task.

    An instance is only a model for others: attempts act on copies of it, as `graft.make` built it or
    as it stands.
    """
    if env is None:
        return TaskEnv.env_id, TaskEnv
    build: Callable[[], Any] = partial(make, env, tokenizer=tokenizer)
    if isinstance(env, EnvSource) and env.made_by is not None:
        build = env.spawn
    elif isinstance(env, BaseEnv) and not env.forkable:
        raise UserCodeError(
            f"this {type(env).__name__} cannot be copied (forkable = False), and attempts act on copies; "
            "give the class, or a function that builds one"
        )
    first = build()  # what is no environment is refused here, before anything is sampled
    name = first.unwrapped.env_id
    first.close()
    return name, lambda task: build()


def as_task(given: Any, number: int, env: str) -> Task:
    """A Task, or a prompt as one."""
    if isinstance(given, Task):
        return given
    if isinstance(given, str):
        if env != TaskEnv.env_id:
            raise UserCodeError(
                f"tasks[{number}] is a prompt, and the environment {env} poses its own; leave env out, or "
                "give a number of tasks"
            )
        prompt: tuple[Message, ...] = ({"role": "user", "content": given},)
        return Task(f"{TaskEnv.env_id}:{number}:{given}", TaskEnv.env_id, prompt)
    raise UserCodeError(
        f"tasks[{number}] is {describe_value(given)}; it must be a graft.Task or a prompt, a text"
    )


def check_tasks(listed: Sequence[Task], env: EnvLike | None, has_reward: bool) -> None:
    """Refuse tasks with equal ids, without a prompt, or without a reward."""
    if not listed:
        raise UserCodeError("tasks is empty; give one task at least, or a number of them")
    counted: dict[str, int] = {}
    for number, task in enumerate(listed):
        if task.id in counted:
            raise UserCodeError(
                f"tasks[{counted[task.id]}] and tasks[{number}] have the same id {task.id!r}, so their "
                "attempts would be the same; give each its own id, and ask for more samples of one task"
            )
        counted[task.id] = number
        if env is None and not task.prompt:
            raise UserCodeError(
                f"task {task.id!r} has no prompt, and there is no environment that would pose it; give "
                "env=..., or Task(..., prompt=[{'role': 'user', 'content': '...'}])"
            )
    if env is None and not has_reward:
        raise UserCodeError("prompts without an environment earn nothing; give reward=...")
