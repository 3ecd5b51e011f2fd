"""One set of held-out tasks: an environment with its arguments, wrappers and reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.envs.table import build_env
from graft.envs.tool_env import ToolEnv
from graft.envs.wrappers import WRAPPERS, listed_wrappers, wrap
from graft.protocols import Env
from graft.types import Task


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Tasks of one environment: column `label` of the table."""

    label: str
    env: str
    args: dict[str, Any]
    wrappers: Sequence[str | dict[str, Any]] = ()
    reward: Any = ""
    """A reward from outside, as in task.reward; empty: the environment's own."""
    is_whole: bool = False
    """True for a benchmark: all of its rows are used unless a number is given."""
    has_tools: bool = True
    """False: the same tasks without any tool."""
    shows_answers: bool = False
    """Whether the table has em, acc and f1 of the answers and the calls of each tool."""
    prefill: str = ""
    """Text that every answer begins with, as in task.prefill."""
    build: Callable[[Task], Env] | None = None
    """Of an environment that was given as an object; None: `env` names it."""

    def factory(self, tokenizer: Any) -> Callable[[Task], Env]:
        """A fresh environment for a task."""
        if (build := self.build) is not None:
            return lambda task: wrap(build(task), self.wrappers, tokenizer)
        if self.has_tools:
            return lambda task: build_env(
                self.env, wrappers=self.wrappers, tokenizer=tokenizer, **self.args
            )
        named = listed_wrappers(self.wrappers)
        others: list[Any] = [{name: args} for name, args in named if not brings_tools(name)]

        def bare(task: Task) -> Env:
            env = build_env(self.env, **self.args)
            while isinstance(env, ToolEnv):  # an environment that brings its own
                env = env.env
            return wrap(env, others, tokenizer)

        return bare

    @property
    def depends_on(self) -> dict[str, Any]:
        """Everything that the tasks and their grades depend on, as plain values."""
        values = {
            "env": self.env,
            "args": self.args,
            "wrappers": list(self.wrappers),
            "reward": self.reward,
            "has_tools": self.has_tools,
        }
        data = self.args.get("data")
        if isinstance(data, str) and (stamp := _stamp(data)):  # the file may be edited later
            values["data"] = stamp
        elif isinstance(data, list | tuple):
            values["data"] = [_stamp(str(one)) for one in data]
        return values


def _stamp(data: str) -> list[int]:
    """The size and time of a file; of anything else nothing is known."""
    file = Path(data)
    return [file.stat().st_size, file.stat().st_mtime_ns] if file.is_file() else []


def brings_tools(wrapper: Any) -> bool:
    """Whether a wrapper's name is that of one that adds tools."""
    return str(WRAPPERS.get(wrapper, "")).startswith("graft.envs.wrappers.tools:")
