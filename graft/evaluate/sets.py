"""Sets of held-out tasks by name: what `graft eval --on` is told.

    --on earl:sort-4,long=earl:sort-4-5 --args long.tools=[swap]

is two sets. Both take the arguments of the recipe's own environment (its dress, its limits), except
what an id fixes by itself: `earl:calc-count` stays one task, whatever mix the recipe draws from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graft.config import ConfigError, Tasks
from graft.envs import find, make
from graft.envs.base import as_messages
from graft.protocols import Env
from graft.registry import load
from graft.text.chat import Chat
from graft.types import Task


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Tasks of one environment: column `label` of the table."""

    label: str
    env: str
    args: dict[str, Any]
    wrappers: Sequence[str | dict[str, Any]] = ()

    def factory(self, tokenizer: Any) -> Callable[[Task], Env]:
        """A fresh environment for a task."""
        return lambda task: make(self.env, wrappers=self.wrappers, tokenizer=tokenizer, **self.args)


def read_sets(on: str, given: Sequence[str], recipe: Tasks) -> list[TaskSet]:
    """`on` is ID or LABEL=ID, separated by commas; `given` is LABEL.key=value. Empty: the recipe's.

    The recipe's own environment is posed as its run poses it. Any other one is asked for its test
    split, if it has splits and the recipe's `eval_args` name none.
    """
    names = [name.strip() for name in on.split(",") if name.strip()]
    if on and not names:
        raise ConfigError(
            f"--on {on!r} names no set; give ids, or leave --on out for the run's own"
        )
    names = names or [recipe.env]
    if not names[0]:
        raise ConfigError(
            "the recipe names no task.env, so there is nothing to evaluate; give --on"
        )
    sets: dict[str, TaskSet] = {}
    for name in names:
        label, has_label, env = name.partition("=")
        env = env if has_label else label
        if not label or not env:
            raise ConfigError(f"--on {name!r} is neither ID nor LABEL=ID (short=earl:sort-4)")
        if label in sets:
            raise ConfigError(
                f"--on names {label!r} twice; tell them apart: first={env},second={env}"
            )
        sets[label] = TaskSet(label, env, _arguments(env, recipe), recipe.wrappers)
    for text in given:
        label, key, value = _read_argument(text, list(sets))
        sets[label] = replace(sets[label], args={**sets[label].args, key: value})
    return list(sets.values())


def _arguments(env: str, recipe: Tasks) -> dict[str, Any]:
    if env == recipe.env:
        return {**recipe.args, **recipe.eval_args}
    entry = find(env)
    build = load(entry.build, "env") if isinstance(entry.build, str) else entry.build
    held_out = {"split": "test"} if "split" in inspect.signature(build).parameters else {}
    carried = {**recipe.args, **held_out, **recipe.eval_args}
    return {key: value for key, value in carried.items() if key not in entry.args}


def _read_argument(text: str, labels: list[str]) -> tuple[str, str, Any]:
    """LABEL.key=value; a label may hold dots and colons itself, so it is looked for."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    label = max((one for one in labels if text.startswith(f"{one}.")), key=len, default="")
    key, has_value, _ = (rest := text[len(label) + 1 :]).partition("=")
    if not label or not key or not has_value:
        raise ConfigError(
            f"--args {text!r} is not LABEL.key=value with one of the labels {', '.join(labels)}"
        )
    try:
        return label, key, OmegaConf.to_container(OmegaConf.from_dotlist([rest]))[key]  # pyright: ignore
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"--args {text!r}: {error}") from error


def pose_one(tasks: TaskSet, task: Task, chat: Chat, max_turns: int) -> None:
    """Pose a task and write its prompt: a set that cannot be used says so before anything is run."""
    try:
        env = tasks.factory(chat.tokenizer)(task)
        try:
            observation, info = env.reset(task.seed)
            if env.observe_as == "raw":  # a wrapper has put it through the chat template
                chat.tokenizer.encode(str(observation))
            else:
                chat.prompt(as_messages(observation), info.get("tools"))
            if max_turns > 1 and env.observe_as in ("user", "tool"):
                chat.check_append_only()
        finally:
            env.close()
    except (TypeError, ValueError, OSError, ImportError) as error:
        raise ConfigError(
            f"set {tasks.label!r} ({tasks.env} with {tasks.args}) cannot be posed: {error}. "
            f"Arguments come from the recipe; change them for this set with --args "
            f"'{tasks.label}.key=value', for all with task.args={{...}}"
        ) from error
