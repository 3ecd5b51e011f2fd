"""Which tasks of a set are not held out: rows that the run trains on, or tasks of a split for training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from graft.config import Config
from graft.data.errors import DataError
from graft.envs.dataset.shared_rows import num_shared_rows, same_file
from graft.envs.table import build_env
from graft.evaluate.task_set import TaskSet


def not_held_out(config: Config, tasks: TaskSet, env: Any, seeds: Sequence[int]) -> str:
    """Why the tasks that these seeds choose are not all held out; "" where they are.

    4 of its 20 tasks are rows that the run trains on
    """
    if trained := num_trained(config, env, seeds):
        which = "its" if trained == len(seeds) else f"{trained} of its"
        return f"{which} {len(seeds)} tasks are rows that the run trains on"
    split = tasks.args.get("split")
    return f"its tasks are of the split {split!r}" if split == "train" else ""


def num_trained(config: Config, env: Any, seeds: Sequence[int]) -> int:
    """Of the rows that these seeds choose in `env`, how many the recipe trains on."""
    table = getattr(getattr(env, "unwrapped", env), "table", None)
    if table is None:
        return 0  # its tasks are drawn
    if config.sft.is_on and same_file(table, Path(config.sft.data)):
        return len({seed % len(table) for seed in seeds})
    most = 0
    for item in config.task.envs:
        try:
            with closing(build_env(item.env, **(item.args or {}))) as trained:
                most = max(most, num_shared_rows(trained, env, seeds))
        except (DataError, ValueError, TypeError, OSError, ImportError):
            continue  # its rows are no longer there: nothing can be compared
    return most
