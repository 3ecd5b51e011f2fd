"""Sets of held-out tasks by name: the argument of `graft eval --on`.

    --on aime24,earl:sort-4,long=earl:sort-4-5 --args long.tools=[swap] --args aime24.data=rows.jsonl

are three sets: a benchmark, which defines its prompts and grading, and two environments. These
take the arguments of the recipe's own environment (its syntax, its limits), except those that an id
fixes: `earl:calc-count` stays one task, whatever mix the recipe draws from; and except those that say
what rows the recipe has and how to read them: those are the recipe's rows, and no other set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from graft.config import ConfigError, TaskSection, read_arguments
from graft.envs import find
from graft.envs.base import as_messages
from graft.envs.dataset.base import num_rows
from graft.evaluate.task_set import TaskSet
from graft.protocols import Env
from graft.recipe.attempt_keys import EnvItem
from graft.registry import UnknownName
from graft.text.chat import Chat
from graft.types import Task

ROWS = frozenset((
    "data", "rows", "hub", "hub_split", "layout", "skip_bad", "template", "system",
    "prompt_key", "question_key", "answer_key", "test_key", "image_key",
))  # fmt: skip
"""Arguments that name rows or describe their columns."""


def read_sets(
    on: str,
    given: Sequence[str],
    recipe: TaskSection,
    held_out: Sequence[EnvItem] | None = None,
    *,
    has_tools: bool = True,
) -> list[TaskSet]:
    """`on` is ID or LABEL=ID, separated by commas; `given` is LABEL.key=value. Empty: `held_out`,
    the environments of held-out tasks (None: those of the run).

    The recipe's own environments are posed as its run poses them. Any other one uses its test split,
    if it has splits and the recipe's `eval_args` name none.
    """
    names = [name.strip() for name in on.split(",") if name.strip()]
    if on and not names:
        raise ConfigError(
            f"--on {on!r} names no set; give ids, or leave --on out for the run's own"
        )
    held_out = recipe.envs if held_out is None else held_out
    own = {item.label: item for item in (*recipe.envs, *held_out)}
    names = names or [item.label for item in held_out]
    if not names:
        raise ConfigError(
            "nothing says what to evaluate on: the recipe names no task.env; give --on (on=), such as "
            "math500 or an environment's id"
        )
    ids: dict[str, str] = {}
    for name in names:
        label, has_label, env = name.partition("=")
        env = env if has_label else label
        if not label or not env:
            raise ConfigError(f"--on {name!r} is neither ID nor LABEL=ID (short=earl:sort-4)")
        if label in ids:
            raise ConfigError(
                f"--on names {label!r} twice; tell them apart: first={env},second={env}"
            )
        ids[label] = env
    arguments: dict[str, dict[str, Any]] = {label: {} for label in ids}
    for text in given:
        label, key, value = _read_argument(text, list(ids))
        arguments[label][key] = value
    sets = [
        _set_of(label, env, arguments[label], recipe, own.get(env)) for label, env in ids.items()
    ]
    return [replace(tasks, has_tools=has_tools) for tasks in sets]


def _set_of(
    label: str, env: str, given: dict[str, Any], recipe: TaskSection, own: EnvItem | None
) -> TaskSet:
    from graft.evaluate.benchmarks import BENCHMARKS

    given = dict(given)
    if env in BENCHMARKS:
        tasks = BENCHMARKS[env].task_set(data=given.pop("data", None))
        tasks = replace(tasks, wrappers=_wrappers_of(tasks, label, given))
        reward = given.pop("reward", tasks.reward)
        args = {**tasks.args, **given}
        tasks = replace(tasks, label=label, args=args, reward=reward, is_whole=True)
        return replace(tasks, prefill=recipe.prefill)
    [item] = recipe.completed(env) if own is None else [own]
    reward = given.pop("reward", item.reward)
    try:
        found = _arguments(env, recipe) if own is None else own.held_out_args
        if "data" in given and "split" not in (item.eval_args or {}):
            found.pop("split", None)  # a file that is named is used whole
        args = {**found, **given}
    except UnknownName as error:
        raise UnknownName(f"{error}. Benchmarks: {', '.join(sorted(BENCHMARKS))}") from None
    wrappers, prefill = item.wrappers or (), item.prefill or ""
    return TaskSet(label, item.env, args, wrappers, reward, prefill=prefill)


def _wrappers_of(tasks: TaskSet, label: str, given: dict[str, Any]) -> Sequence[Any]:
    """A benchmark's wrappers with the options of its tools that were given, which leave `given`."""
    from graft.evaluate.benchmarks.benchmark import tools_of, with_tool_options

    wrappers = tasks.wrappers
    for tool in [name for name in ("search", "python") if name in given]:
        options = given.pop(tool)
        if tool not in tools_of(wrappers):
            raise ConfigError(f"--args {label}.{tool}: this benchmark has no tool {tool!r}")
        if not isinstance(options, dict):
            raise ConfigError(
                f"--args {label}.{tool}={options}: options of a tool are {{name: value}}, such as "
                f"{label}.{tool}={{timeout: 30}}"
            )
        wrappers = with_tool_options(wrappers, tool, options)
    return wrappers


def _arguments(env: str, recipe: TaskSection) -> dict[str, Any]:
    """The arguments of an environment that the recipe does not have: the recipe's, without its rows and
    without what the environment's id fixes."""
    held_out = {"split": "test"} if "split" in find(env).parameters() else {}
    carried = {**recipe.args, **held_out, **recipe.eval_args}
    apart = ROWS | set(find(env).args)
    return {key: value for key, value in carried.items() if key not in apart}


def _read_argument(text: str, labels: list[str]) -> tuple[str, str, Any]:
    """LABEL.key=value; labels may contain dots and colons, so known labels are matched."""
    label = max((one for one in labels if text.startswith(f"{one}.")), key=len, default="")
    key, has_value, _ = (rest := text[len(label) + 1 :]).partition("=")
    if not label or not key or not has_value:
        raise ConfigError(
            f"--args {text!r} is not LABEL.key=value with one of the labels {', '.join(labels)}"
        )
    return label, key, read_arguments([rest])[key]


def pose_one(tasks: TaskSet, task: Task, chat: Chat, max_turns: int) -> tuple[Env, int | None]:
    """Pose a task and render its prompt, so that an unusable set is refused before anything is sampled.

    Returns its environment, closed, and the number of tasks; None where they are generated without end.
    """
    try:
        env = tasks.factory(chat.tokenizer)(task)
        try:
            rows = num_rows(env)
            if rows == 0:
                raise ValueError("it has no tasks")
            observation, info = env.reset(task.seed)
            if env.observe_as == "raw":  # a wrapper has already applied the chat template
                chat.encode(str(observation), is_start=True)
            else:
                chat.prompt(as_messages(observation), info.get("tools"))
            if max_turns > 1 and env.observe_as in ("user", "tool"):
                chat.history_note()  # raises where the template cannot hold a conversation
        finally:
            env.close()
    except (TypeError, ValueError, OSError, ImportError) as error:
        raise ConfigError(
            f"set {tasks.label!r} ({tasks.env} with {tasks.args}) cannot be posed: {error}. "
            f"Arguments come from the recipe; change them for this set with --args "
            f"'{tasks.label}.key=value', for all with task.args={{...}}"
        ) from error
    return env, rows
