"""Rewards: pure functions `(Task, Trajectory) -> float`, for tasks that the environment does not grade.

`make_reward` builds the reward that a recipe names:

f1                                            a bundled reward
{judge: {url: "http://host:8001/v1"}}         with keywords
my_rewards:compute_score                      your own, in graft's, verl's or TRL's signature
{"my_rewards:Grader": {strict: true}}         a class: one instance, with these keywords

The rewards of a list are added, each times its weight, which is 1 by default:

[math_answer, {"my_rewards:brief": {most: 40}, weight: 0.2}]
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from graft.plugins import Table
from graft.protocols import Reward
from graft.registry import check_options, resolve
from graft.rewards.plugins import adapt, check_form, filled_parameters, name_of
from graft.rewards.weighted import Component, WeightedSum

OWN: dict[str, Any] = {
    "countdown": "graft.rewards.answers:countdown",
    "deep_research": "graft.rewards.deep_research:deep_research",
    "exact_match": "graft.rewards.answers:exact_match",
    "f1": "graft.rewards.answers:f1",
    "hendrycks_math": "graft.rewards.maths.hendrycks:hendrycks_math",
    "judge": "graft.rewards.judge:Judge",
    "math_answer": "graft.rewards.answers:math_answer",
}
REWARDS = Table("graft.rewards", OWN)
"""Name -> "module:attribute" of the reward; `make_reward` builds an instance of a class."""

RewardSpec = str | Mapping[str, Any] | Sequence[Any] | Callable[..., Any]
"""A name, {name: {keyword: value}}, a list of these; from Python also a function."""

FORMS = "a name, {name: {keyword: value}}, or a list of these, each with a weight if it is not 1"


def make_reward(spec: RewardSpec) -> Reward:
    """The reward that `spec` describes; its `blocking` is True if it has to run in a thread.

    >>> make_reward("f1").__name__, make_reward({"judge": {"url": "http://localhost:1/v1"}}).blocking
    ('f1', True)
    >>> [each.weight for each in make_reward(["f1", {"exact_match": {}, "weight": 0.5}]).components]
    [1.0, 0.5]
    """
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        return _weighted_sum(spec)
    if not isinstance(spec, str | Mapping):  # from Python
        if not callable(spec) or inspect.isclass(spec):
            raise ValueError(f"reward {spec!r}: must be {FORMS}; or a function (task, trajectory)")
        if inspect.isfunction(spec):
            check_form(spec)
        return adapt(spec)
    if isinstance(spec, Mapping) and len(spec) > 1:
        raise ValueError(f"reward {dict(spec)!r}: must be {FORMS}{_as_list(spec)}")
    name, keywords = _read(spec)
    found = resolve(name, REWARDS, "reward")
    what = f"reward {name!r}"
    if not callable(found):
        raise ValueError(f"{what} is a {type(found).__name__}, not a function or a class")
    if "weight" in keywords and "weight" not in inspect.signature(found).parameters:
        others = {key: value for key, value in keywords.items() if key != "weight"}
        raise ValueError(
            f"{what} has no argument 'weight': the weight stands beside the name, in a list: "
            f"[{{{name}: {others}, weight: {keywords['weight']}}}]"
        )
    if inspect.isclass(found):
        check_options(found, keywords, what)
        return adapt(found(**keywords))  # pyright: ignore[reportArgumentType]
    if not keywords:
        check_form(found)
    check_options(found, keywords, what, given=filled_parameters(found))
    if not keywords:
        return adapt(found)
    bound = partial(found, **keywords)
    vars(bound)["blocking"] = bool(getattr(found, "blocking", False))  # a partial hides it
    return adapt(bound)


def _weighted_sum(entries: Sequence[Any]) -> WeightedSum:
    """The sum of a list of rewards; the weight is a second key: {f1: {}, weight: 0.5}."""
    if not entries:
        raise ValueError("reward []: name at least one reward")
    components: list[Component] = []
    for entry in entries:
        weight: Any = 1.0
        if isinstance(entry, Mapping) and len(entry) > 1:
            if "weight" not in entry or len(entry) > 2 or "name" in entry:
                raise ValueError(
                    f"reward {dict(entry)!r}: several rewards are written [f1, {{exact_match: {{}}, "
                    "weight: 0.5}]" + _as_list(entry)
                )
            weight = entry["weight"]
            entry = {name: keywords for name, keywords in entry.items() if name != "weight"}
        name = name_of(entry) if callable(entry) else _read(entry)[0]
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight) or weight == 0:
            raise ValueError(f"reward {name!r}: weight {weight!r} must be a number other than 0")
        label = _label(name, [each.name for each in components])
        components.append(Component(label, make_reward(entry), float(weight)))
    return WeightedSum(tuple(components))


def _label(name: str, taken: Sequence[str]) -> str:
    """The name of its metric: reward/brief for "my_rewards:brief", reward/brief_2 for a second one."""
    short = name.rpartition(":")[2].rpartition(".")[2]
    label, number = short, 1
    while label in taken:
        number += 1
        label = f"{short}_{number}"
    return label


def _as_list(entry: Mapping[str, Any]) -> str:
    """A suggestion for {name: f1, weight: 0.5} or {f1: 1, exact_match: 0.5}, which are common mistakes."""
    name, weight = entry.get("name"), entry.get("weight", 1.0)
    if isinstance(name, str):
        return f"; did you mean [{{{name}: {{}}, weight: {weight}}}]?"
    if all(isinstance(value, int | float) for value in entry.values()):
        listed = ", ".join(f"{{{key}: {{}}, weight: {value}}}" for key, value in entry.items())
        return f"; did you mean [{listed}]?"
    return ""


def _read(spec: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(spec, str):
        return spec, {}
    if not isinstance(spec, Mapping) or len(spec) != 1:
        raise ValueError(f"reward {spec!r}: must be {FORMS}")
    ((name, keywords),) = spec.items()
    if not isinstance(name, str):
        raise ValueError(f"reward {spec!r}: {name!r} is not a name")
    if not isinstance(keywords, Mapping | None):
        raise ValueError(
            f"reward {name!r}: keywords must be written {{keyword: value}}, not {keywords!r}"
            f"{_as_list(spec)}"
        )
    return name, dict(keywords or {})
