"""The info of an environment's last turn, as a leaf keeps it: plain JSON of limited size.

    {"score": np.float64(0.5), "grid": [[0, ...], ...]}   ->   {"score": 0.5, "left_out": ["grid"]}

A reward reads it as `trajectory.info`; it is written to the episode log with the leaf.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from graft.envs.interop.external import plain

MOST_OF_ONE, MOST_OF_ALL = 4_096, 16_384
"""Characters of JSON that one entry and all of them may have."""

OF_THE_TASK = ("answer", "tools", "meta", "data_source")
"""Entries of a reset's info that the task holds."""


def last_info(info: Any) -> dict[str, Any]:
    """Entries that are too large, or that JSON cannot hold, are named under "left_out"."""
    kept: dict[str, Any] = {}
    left_out: list[str] = []
    room = MOST_OF_ALL
    for name, value in info.items() if isinstance(info, Mapping) else ():
        entry: Any = None
        try:
            entry = plain(value)
            size = len(json.dumps(entry, ensure_ascii=False).encode())
        except Exception:  # objects of an environment may raise anything when they are converted
            size = MOST_OF_ALL + 1
        if size <= min(MOST_OF_ONE, room):
            kept[str(name)] = entry
            room -= size
        else:
            left_out.append(str(name))
    return {**kept, "left_out": left_out} if left_out else kept


def info_of_reset(info: Mapping[str, Any]) -> dict[str, Any]:
    """The info of a reset, without the entries that the task holds."""
    return {name: value for name, value in info.items() if name not in OF_THE_TASK}
