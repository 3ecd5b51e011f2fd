"""Which tasks of a set are not held out: rows that the run trains on, or tasks of a split for training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graft.config import Config
from graft.envs.dataset.shared_rows import RowSet
from graft.evaluate.task_set import TaskSet
from graft.train.leakage import env_makers, find_leakage, trained_rows


def not_held_out(
    config: Config, posed: Sequence[tuple[TaskSet, Any, Sequence[int]]]
) -> dict[str, str]:
    """Why the tasks of some sets are not all held out, by label; `posed`: sets, their environments and seeds.

    {"math": "4 of its 20 tasks are rows that the run trains on"}
    """
    sets = [RowSet.of_env(tasks.label, env, seeds) for tasks, env, seeds in posed]
    listed = [one for one in sets if one is not None]
    found: dict[str, str] = {}
    for tasks, _, _ in posed:
        if (split := tasks.args.get("split")) == "train":
            found[tasks.label] = f"its tasks are of the split {split!r}"
    for one in find_leakage(
        listed, list(trained_rows(config, env_makers(config))) if listed else []
    ):
        if one.leaked:
            which = "its" if one.leaked == one.tasks else f"{one.leaked} of its"
            found[one.name] = f"{which} {one.tasks} tasks are rows that the run trains on"
    return found
