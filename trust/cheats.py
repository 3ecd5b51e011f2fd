"""Attempts that solve nothing, on every environment: what they earn, next to a random policy.

The cheats are those of `graft doctor RECIPE` (graft/doctor/cheats.py). A row is a family of environments;
a cheat fails where it is paid more than luck explains and `KNOWN` does not say so, and where an
environment raises. The count is the number of environments: all of them in full, with rows made up for
those that need data.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import groupby
from typing import Any

from graft.doctor.cheats import Earned, forms_here, is_paid, play, random_policy
from graft.doctor.rewards import RewardTrial
from graft.envs import ENVS
from graft.envs.entry import family_of
from graft.envs.wrappers import wrap
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.types import Task
from tests.envs.env_kit import build
from trust.bank import Row

TASKS = 8
MAX_TURNS = 12
LIMIT = 60.0  # seconds for one environment
WITH_TOOLS = ["arithmetic+python_tool", "rg:chain_sum+python_tool", "rg:zebra_puzzles+python_tool"]
"""Environments with the python tool, for calls without a purpose and for the generator."""

_BONUS = dict.fromkeys(
    ("a program without work", "the question again", "calls without a purpose"), 0.5
)
_DISTANCE = dict.fromkeys(("a constant", "the question again", "every candidate"), 0.9)
KNOWN: dict[str, dict[str, float]] = {
    # partial credit of the library, for answers that are nearly right
    "rg:knights_knaves": {"the question again": 0.7},
    "rg:polynomial_equations": {"a constant": 0.5},
    "rg:rectangle_count": {"a constant": 0.6, "the question again": 0.6},
    "rg:propositional_logic": {"the question again": 0.7},  # a premise is a valid conclusion
    **{name: _DISTANCE for name in ENVS if name.startswith("game:GuessTheNumber")},
    "code": {"a program without work": 0.3},  # a made-up row asks for its input plus 0
    **dict.fromkeys(WITH_TOOLS, _BONUS),  # half of a right answer: see max_tool_reward
}
"""Environment or family -> kind of cheat -> the most that it earns beyond luck; docs/rewards.md has the
reasons."""


def names() -> list[str]:
    """Every environment, those that differ most first."""
    first = ["rg:puzzle24", "game:GuessTheNumber-v0", WITH_TOOLS[1]]
    return [*first, *(one for one in [*ENVS, *WITH_TOOLS] if one not in first)]


SMALL, FULL = 3, len(ENVS) + len(WITH_TOOLS)


def run(count: int, seed: int) -> Iterator[Row]:
    chosen = names()[:count]
    for family, members in groupby(sorted(chosen, key=_group), key=_group):
        row = Row("cheats", family, 0)
        best, by_chance = Earned("", 0.0, "", 0), 0.0
        for name in members:
            try:
                chance, right, found, luck = measure(name, seed)
            except Exception as error:  # whatever an environment raises is a failure of it
                row.failures.append(f"{name}: {type(error).__name__}: {error}")
                continue
            row.count += sum(one.attempts for one in found)
            row.failures += unexpected(name, chance, right, found, luck)
            if found[0].mean - chance > best.mean - by_chance:
                best, by_chance = found[0]._replace(shown=f"{name}: {found[0].kind}"), chance
        row.measured = {
            "most": f"{best.mean:.2f} ({best.shown})",
            "random policy there": round(by_chance, 2),
        }
        yield row


def measure(name: str, seed: int = 0) -> tuple[float, float, list[Earned], dict[str, float]]:
    """What the random policy, a right answer and each kind of cheat earn, and what luck explains."""
    env_id, _, wrapper = name.partition("+")
    make = partial(_make, env_id, wrapper)
    trial = RewardTrial(make, None, Chat(FastTokenizer.bytes(), "plain"), MAX_TURNS)
    draw = random.Random(seed)
    tasks = [Task(f"{env_id}:{n}", env_id, seed=draw.randrange(10**6)) for n in range(TASKS)]
    forms, right = forms_here(trial, tasks[0])
    found = play(trial, tasks, forms, LIMIT)
    return random_policy(trial, tasks), right, found, by_luck(trial, tasks, right)


def by_luck(trial: RewardTrial, tasks: Sequence[Task], right: float) -> dict[str, float]:
    """What a guess earns because it is right, in these tasks. A constant is right as often as the
    commonest answer; a part of the question as often as the answer stands there.

    gold answers True, False, True, True     a constant 0.75
    gold answers 3, 8, 5, 12, and "Of 3, 8 and 11 ...": the question again 0.5
    """
    golds = [_plain(trial.gold(task)) for task in tasks]
    known = [gold for gold in golds if gold]
    commonest = Counter(known).most_common(1)[0][1] if known else 0
    stated = 0
    for task, gold in zip(tasks, golds, strict=True):
        with closing(trial.make_env(task)) as env:
            stated += bool(gold) and gold in _plain(env.reset(task.seed)[0])
    share = right * commonest / len(tasks)
    repeated = max(share, right * stated / len(tasks))
    return {"a constant": share, "every candidate": share, "the question again": repeated}


def _plain(text: Any) -> str:
    """Numbers by value, texts without case and blanks."""
    joined = "".join(str(text if text is not None else "").lower().split())
    try:
        return f"{float(joined):.15g}"
    except ValueError:
        return joined


def unexpected(
    name: str, chance: float, right: float, found: list[Earned], luck: Mapping[str, float]
) -> Iterator[str]:
    known = KNOWN.get(name) or KNOWN.get(_group(name), {})
    for one in found:
        allowed = max(known.get(one.kind, 0.0), luck.get(one.kind, 0.0)) + 1e-9
        if is_paid(one.mean, chance, right) and one.mean > allowed:
            yield (
                f"{name}: {one.kind} earns {one.mean:.2f} of {right:g}, the random policy {chance:.2f}: "
                f"{one.shown!r}"
            )


def _make(env_id: str, wrapper: str, task: Task) -> Any:
    env = build(env_id)
    return wrap(env, wrapper) if wrapper else env


def _group(name: str) -> str:
    return "with the python tool" if "+" in name else family_of(name)


if __name__ == "__main__":  # the table of docs/rewards.md
    for name in names():
        chance, right, found, luck = measure(name)
        print(json.dumps([name, chance, right, [tuple(one) for one in found], luck]), flush=True)
