"""The reward that a recipe names.

f1                                            a bundled one
{judge: {url: "http://host:8001/v1"}}         with keywords
my_rewards:compute_score                      your own, in graft's, verl's or TRL's signature
{"my_rewards:Grader": {strict: true}}         a class: made once, with these keywords
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from graft.protocols import Reward
from graft.registry import resolve
from graft.rewards import REWARDS
from graft.rewards.plugins import adapt, filled_in
from graft.tools.options import check_options


def make_reward(spec: str | Mapping[str, Any]) -> Reward:
    """The reward that `spec` describes; `blocking` on it is True if it is to run in a thread.

    >>> make_reward("f1").__name__, make_reward({"judge": {"url": "http://localhost:1/v1"}}).blocking
    ('f1', True)
    """
    name, keywords = _read(spec)
    found = resolve(name, REWARDS, "reward")
    what = f"reward {name!r}"
    if not callable(found):
        raise ValueError(f"{what} is a {type(found).__name__}, not a function or a class")
    if inspect.isclass(found):
        check_options(found, keywords, what)
        made: Any = found(**keywords)
        return adapt(made)
    check_options(found, keywords, what, given=filled_in(found))
    if not keywords:
        return adapt(found)
    bound = partial(found, **keywords)
    vars(bound)["blocking"] = bool(getattr(found, "blocking", False))  # a partial hides it
    return adapt(bound)


def _read(spec: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(spec, str):
        return spec, {}
    if not isinstance(spec, Mapping) or len(spec) != 1:
        raise ValueError(f"reward {spec!r}: must be a name, or {{name: {{keyword: value}}}}")
    ((name, keywords),) = spec.items()
    if not isinstance(name, str):
        raise ValueError(f"reward {spec!r}: {name!r} is not a name")
    if not isinstance(keywords, Mapping | None):
        raise ValueError(
            f"reward {name!r}: keywords must be written {{keyword: value}}, not {keywords!r}"
        )
    return name, dict(keywords or {})
