"""Tell in which settings runs differ, and which runs differ in the seed alone.

runs/calm/config.yaml   run: {name: calm, seed: 0}   train: {steps: 40, lr: 0.0002}
runs/hot/config.yaml    run: {name: hot, seed: 0}    train: {steps: 40, lr: 0.002}
runs/hot1/config.yaml   run: {name: hot1, seed: 1}   train: {steps: 40, lr: 0.002}

differing     {"run.seed": ["0", "0", "1"], "train.lr": ["0.0002", "0.002", "0.002"]}
seed_groups   [[0], [1, 2]]
in_short      ["lr 0.0002, seed 0", "lr 0.002, seed 0", "lr 0.002, seed 1"]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

OWN = {"run.name", "run.dir"}
"""Differs between all runs, so it is not compared."""
MAX_SETTINGS = 200
LONGEST = 200

SHORT = {
    "algo.name": "algo",
    "model.path": "model",
    "task.env": "env",
    "train.lr": "lr",
    "run.seed": "seed",
    "rollout.samples": "samples",
    "train.steps": "steps",
}
"""What a table says for a key; these come first in it."""
MAX_IN_SHORT, LONGEST_IN_SHORT = 6, 24


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Dotted names of all values that are not tables: {"train.lr": 0.0002}."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = value
    return found


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str | None]]:
    """Setting -> its value in each run; None where a run has no such setting.

    The usual suspects come first; the section `run` (how often to save or evaluate) does not change what is
    learned, so it comes last.
    """
    known = [{name: _text(value) for name, value in flat(config).items()} for config in configs]
    names = dict.fromkeys(name for config in known for name in config if name not in OWN)
    found = {name: [config.get(name) for config in known] for name in names}
    differ = [name for name, values in found.items() if len(set(values)) > 1]
    first = [name for name in SHORT if name in differ]
    rest = sorted(
        (name for name in differ if name not in SHORT), key=lambda n: n.startswith("run.")
    )
    return {name: found[name] for name in [*first, *rest][:MAX_SETTINGS]}


def in_short(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that distinguish each run from the others, in short; omitted ones are counted."""
    found = differing(configs)
    names = list(found)
    last = [name.rpartition(".")[2] for name in names]
    labels = {
        name: SHORT.get(name) or (end if last.count(end) == 1 else name)
        for name, end in zip(names, last, strict=True)
    }
    texts: list[str] = []
    for number in range(len(configs)):
        own = [
            (labels[name], value) for name in names if (value := found[name][number]) is not None
        ]
        shown = [f"{label} {_end_of(value)}" for label, value in own[:MAX_IN_SHORT]]
        more = len(own) - len(shown)
        texts.append(", ".join([*shown, *([f"{more} more"] if more else [])]))
    return texts


def seed_groups(configs: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The numbers of runs that differ in nothing but the section `run` (seed, name, how often to save).

    Groups are in the order of their first run; one whose settings cannot be read is alone.
    """
    groups: dict[str, list[int]] = {}
    for number, config in enumerate(configs):
        learned = {name: keys for name, keys in config.items() if name != "run"}
        same = json.dumps(learned, sort_keys=True, default=str) if learned else f"run {number}"
        groups.setdefault(same, []).append(number)
    return list(groups.values())


def env_names(config: Mapping[str, Any]) -> str:
    """The environments of a recipe as config.yaml has it: "calculator", or several: "a, b"."""
    given: Any = config.get("task", {}).get("env", "?")
    items: list[Any] = given if isinstance(given, list) else [given]
    names = [one.get("name") or one.get("env") if isinstance(one, dict) else one for one in items]
    return ", ".join(map(str, names))


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value, default=str))[:LONGEST]


def _end_of(value: str) -> str:
    """Keep the end of a long path: it is more specific than the beginning."""
    if not value:
        return '""'
    return value if len(value) <= LONGEST_IN_SHORT else f"…{value[1 - LONGEST_IN_SHORT :]}"
