"""Attempts that solve nothing, on every environment: what they earn, next to a random policy.

The cheats are those of `graft doctor RECIPE` (graft/doctor/cheats.py). A row is a family of environments;
a cheat fails where it is paid and `KNOWN` does not say so, and where an environment raises. The count is
the number of environments: all of them in full, with rows made up for those that need data.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
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

FEW = """acre aiw binary_alternation calendar_arithmetic circuit_logic composite course_schedule
game_of_life_halting gcd isomorphic_strings knight_swap largest_island lcm letter_counting list_functions
mahjong_puzzle manipulate_matrix maze number_sequence products ransom_note rotten_oranges self_reference
shortest_path syllogism""".split()  # noqa: SIM905
"""Datasets with few different answers: a constant, or a word of the question, is right as often as that."""
GRADED = ["knights_knaves", "polynomial_equations", "rectangle_count", "time_intervals"]
"""Datasets with partial credit for answers that are nearly right."""
REPEATED = [
    "prime_factorization",  # a prime number is its own
    "propositional_logic",
    "rotate_matrix",
    "string_insertion",
    "string_manipulation",
]
"""Datasets whose right answer is often a part of the question."""
MADE_UP = ["math", "eval", "prompts"]
"""The rows that stand in for their data ask "What is 3 + 4?", and an expression with that value is right."""

_GUESSED = dict.fromkeys(("a constant", "the question again", "every candidate"), 1.0)
_BONUS = dict.fromkeys(
    ("a program without work", "the question again", "calls without a purpose"), 0.5
)
KNOWN: dict[str, dict[str, float]] = {
    "rg": dict.fromkeys(_GUESSED, 0.3),  # two of eight tasks have the same answer by chance
    **{f"rg:{name}": _GUESSED for name in [*FEW, *GRADED, *REPEATED]},
    **{name: {"the question again": 1.0} for name in MADE_UP},
    **{name: _GUESSED for name in ENVS if name.startswith("game:GuessTheNumber")},  # by distance
    "earl:calc-count": {"a constant": 0.7, "every candidate": 0.7},  # a count is often 0
    "earl:calc-repeat": {"the question again": 0.7},
    "earl:rows": {"the question again": 0.9, "a constant": 0.4},
    "logic": _GUESSED,  # true or false
    "code": {"a program without work": 0.3},  # a made-up row asks for its input plus 0
    **dict.fromkeys(WITH_TOOLS, _BONUS),  # half of a right answer: see max_tool_reward
}
"""Environment or family -> kind of cheat -> the most that it earns; docs/rewards.md has the reasons."""


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
                chance, right, found = measure(name, seed)
            except Exception as error:  # whatever an environment raises is a failure of it
                row.failures.append(f"{name}: {type(error).__name__}: {error}")
                continue
            row.count += sum(one.attempts for one in found)
            row.failures += unexpected(name, chance, right, found)
            if found[0].mean - chance > best.mean - by_chance:
                best, by_chance = found[0]._replace(shown=f"{name}: {found[0].kind}"), chance
        row.measured = {
            "most": f"{best.mean:.2f} ({best.shown})",
            "random policy there": round(by_chance, 2),
        }
        yield row


def measure(name: str, seed: int = 0) -> tuple[float, float, list[Earned]]:
    """What the random policy, a right answer and each kind of cheat earn."""
    env_id, _, wrapper = name.partition("+")
    make = partial(_make, env_id, wrapper)
    trial = RewardTrial(make, None, Chat(FastTokenizer.bytes(), "plain"), MAX_TURNS)
    draw = random.Random(seed)
    tasks = [Task(f"{env_id}:{n}", env_id, seed=draw.randrange(10**6)) for n in range(TASKS)]
    forms, right = forms_here(trial, tasks[0])
    return random_policy(trial, tasks), right, play(trial, tasks, forms, LIMIT)


def unexpected(name: str, chance: float, right: float, found: list[Earned]) -> Iterator[str]:
    allowed = KNOWN.get(name) or KNOWN.get(_group(name), {})
    for one in found:
        if is_paid(one.mean, chance, right) and one.mean > allowed.get(one.kind, 0.0):
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
        chance, right, found = measure(name)
        print(json.dumps([name, chance, right, [tuple(one) for one in found]]), flush=True)
