"""Rewards written for other frameworks, called as those frameworks call them.

    graft   (task, trajectory) -> float
    verl    compute_score(data_source, solution_str, ground_truth, extra_info=None)
            -> a number, or a dict with "score"
    TRL     f(prompts, completions, **columns) -> a list with one number; texts, not messages
    ARPO    compute_score(data), a list with one {output, answer, data_source} -> a list with one number;
            the form of its documentation (its own code has verl's)

The names of the parameters identify the form: `solution_str` is verl's, `completions` TRL's, `data` alone
ARPO's. verl's and TRL's also receive the environment's last info: see `ENV_INFO`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from graft.protocols import Reward
from graft.types import Task, Trajectory
from graft.user_code import named

F = TypeVar("F", bound=Callable[..., Any])
Collect = Callable[[Task, Trajectory], dict[str, Any]]
"""All arguments that a framework passes; a function gets those it has parameters for."""
ENV_INFO = "env_info"
"""The key of the environment's last info: an entry of `extra_info`, or a column."""


def blocking(function: F) -> F:
    """Mark a reward that may take time: it runs on a thread, and the other attempts go on meanwhile."""
    vars(function)["blocking"] = True
    return function


def adapt(function: Callable[..., Any]) -> Reward:
    """`function` as a graft reward; a graft reward is returned unchanged.

    >>> def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    ...     return {"score": solution_str.count(ground_truth)}
    >>> reward = adapt(compute_score)  # reward(task, trajectory) is now a float
    """
    if not callable(function):
        raise ValueError(
            f"{named(type(function), 'reward')} cannot be called; write __call__(self, task, trajectory)"
        )
    if any(map(inspect.iscoroutinefunction, (function, function.__call__))):
        raise ValueError(f"reward {name_of(function)} is async; give a plain function")
    signature = inspect.signature(function)
    if (form := form_of(signature)) is not None:
        is_blocking = bool(getattr(function, "blocking", False))
        return Plugin(function, signature, form[0], is_blocking)
    try:
        signature.bind(None, None)
    except TypeError:
        raise _unknown_form(function) from None
    return function


def _unknown_form(function: Callable[..., Any]) -> ValueError:
    return ValueError(
        f"reward {name_of(function)}{inspect.signature(function)} has an unknown form; known are "
        "(task, trajectory), verl's (data_source, solution_str, ground_truth, extra_info=None), TRL's "
        "(completions, **columns) or ARPO's (data), recognised by the names of the parameters"
    )


def check_form(function: Callable[..., Any]) -> None:
    """Refuse a function with parameters that no call fills, unless it has graft's form."""
    filled = filled_parameters(function)
    if filled[:1] == ["task"]:
        return
    for name, one in inspect.signature(function).parameters.items():
        is_named = one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        if is_named and one.default is one.empty and name not in filled:
            raise _unknown_form(function)


def filled_parameters(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters that every call fills; a recipe may set the others."""
    signature = inspect.signature(function)
    form = form_of(signature)
    return form[1] if form else list(signature.parameters)[:2]


def form_of(signature: inspect.Signature) -> tuple[Collect, list[str]] | None:
    """What collects the arguments in the form that the names of the parameters identify, and the parameters
    that every call fills; None for graft's own form."""
    names = signature.parameters
    required = [name for name, one in names.items() if one.default is one.empty]
    if "solution_str" in names:
        return verl_arguments, ["data_source", "solution_str", "ground_truth", "extra_info"]
    if "completions" in names:  # columns depend on the data and have no defaults
        return trl_arguments, required
    return (arpo_arguments, required) if required == ["data"] else None


@dataclass(frozen=True)
class Plugin:
    """A function of another framework as a reward."""

    function: Callable[..., Any]
    signature: inspect.Signature
    collect: Collect
    blocking: bool = False
    """False unless the function sets it: graders that use signals need the main thread."""

    def __call__(self, task: Task, trajectory: Trajectory) -> float:
        arguments = self.collect(task, trajectory)
        taken = self.signature.parameters
        if not any(one.kind is one.VAR_KEYWORD for one in taken.values()):
            arguments = {name: value for name, value in arguments.items() if name in taken}
        try:
            self.signature.bind(**arguments)
        except TypeError as error:
            raise ValueError(
                f"reward {name_of(self.function)}{self.signature} cannot be called for task "
                f"{task.id!r}: {error}; available are {', '.join(sorted(arguments))}"
            ) from None
        result = self.function(**arguments)
        if self.collect is not verl_arguments:
            result = only_entry(result, self.function)
        return read_score(result, self.function)


def verl_arguments(task: Task, trajectory: Trajectory) -> dict[str, Any]:
    return {
        "data_source": task.data_source,
        "solution_str": trajectory.text,
        "ground_truth": task.answer,
        "extra_info": {**task.meta, ENV_INFO: dict(trajectory.info)},
    }


def trl_arguments(task: Task, trajectory: Trajectory) -> dict[str, Any]:
    """A batch of one, with the task's meta as further columns."""
    prompt = "".join(str(message.get("content") or "") for message in task.prompt)
    row = {
        **task.meta,
        ENV_INFO: dict(trajectory.info),
        "data_source": task.data_source,
        "answer": task.answer,
        "ground_truth": task.answer,
        "prompts": prompt,
        "completions": trajectory.text,
    }
    return {name: [value] for name, value in row.items()}


def arpo_arguments(task: Task, trajectory: Trajectory) -> dict[str, Any]:
    """A batch of one: ARPO's documented keys, the prompt and the meta."""
    row = {
        **task.meta,
        "prompt": [dict(message) for message in task.prompt],
        "output": trajectory.text,
        "answer": task.answer,
        "ground_truth": task.answer,
        "data_source": task.data_source,
    }
    return {"data": [row]}


def only_entry(result: Any, function: Callable[..., Any]) -> Any:
    """The entry of the list of one that a function of lists must return: TRL's and ARPO's forms."""
    is_list = isinstance(result, list | tuple) or getattr(result, "ndim", 0) == 1  # numpy, torch
    if not is_list or len(result) != 1:
        seen = f"{len(result)} entries" if is_list else f"a {type(result).__name__}"
        raise ValueError(
            f"reward {name_of(function)} returned {result!r:.200}, {seen}; it gets lists with one attempt "
            "and must return a list with one number for it: a number for a whole list would say nothing "
            "about each attempt. Return [score for ... in ...], or take (task, trajectory) for one attempt"
        )
    return result[0]


def read_score(result: Any, function: Callable[..., Any]) -> float:
    """The number in the result of a plug-in: 1, True, {"score": 1, ...} or [1]."""
    value: Any = result
    if isinstance(result, Mapping):
        value = result.get("score")
    elif isinstance(result, list | tuple) and len(result) == 1:
        value = result[0]
    try:
        score = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        raise ValueError(
            f"reward {name_of(function)} returned {result!r:.200}; it must be a finite number, a dict "
            'with one as "score", or a list with one'
        )
    return score


def name_of(function: Any) -> str:
    """The name in messages: a function's name, an object's class."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__qualname__", None)
    return name or type(function).__qualname__
