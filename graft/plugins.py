"""Parts that installed packages add to graft's tables, found by entry points.

A package names its parts in its own pyproject.toml, and they are known by these names as soon as it is
installed:

    [project.entry-points."graft.envs"]
    maze = "my_package.maze:Maze"                      graft.make("maze"), task.env: maze

    [project.entry-points."graft.env_tables"]
    mazes = "my_package.table:MAZES"                   {"maze:small-v0": EnvEntry(...), ...}

The other groups are graft.tools, graft.rewards, graft.credits, graft.losses, graft.branches and
graft.engines. Nothing is imported before a part is used, or, for env_tables, before the ids are listed.
graft's own packages beside `graft` are found in the same way.
"""

from __future__ import annotations

import tomllib
import warnings
from collections import UserDict
from collections.abc import Mapping
from functools import cache, cached_property
from importlib.metadata import entry_points
from typing import Any

from graft.ours import ROOT, is_ours

DISTRIBUTION = "graft-rl"


@cache
def entries(group: str) -> dict[str, str]:
    """The name of every part of a group and where it is: {"maze": "my_package.maze:Maze"}.

    A name of graft's own is not given to another package; a warning says so.
    """
    checkout = _groups_of_checkout()
    places = dict((checkout or {}).get(group, {}))
    for entry in sorted(entry_points(group=group), key=lambda entry: not is_ours(entry.module)):
        if checkout is not None and is_ours(entry.module):
            continue  # the checkout may be newer than what was installed from it
        if places.setdefault(entry.name, entry.value) != entry.value:
            warnings.warn(
                f"{entry.value!r} is left out: its name in {group}, {entry.name!r}, belongs to "
                f"{places[entry.name]!r}. Its author must choose another name",
                stacklevel=2,
            )
    return places


@cache
def _groups_of_checkout() -> Mapping[str, Mapping[str, str]] | None:
    """The entry points of the checkout that this is, which need not be installed; None if it is none."""
    try:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    except (OSError, KeyError, ValueError):
        return None
    return project.get("entry-points", {}) if project.get("name") == DISTRIBUTION else None


class Table(UserDict[str, Any]):
    """A table of parts by name: graft's own, and those of installed packages as "module:attr".

    Entry points are looked up when the table is first used, so that `import graft` stays quick.
    """

    def __init__(self, group: str, own: Mapping[str, Any]) -> None:
        self.group, self._own = group, own

    @cached_property
    def data(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Every part; `UserDict` reads and changes it."""
        return {**self._own, **self.find(), **self._own}  # its own come first, and win

    @cached_property
    def _foreign(self) -> set[str]:
        brought = self.find().items()
        return {name for name, part in brought if not is_ours(_module(part))} - set(self._own)

    def find(self) -> Mapping[str, Any]:
        """What the packages beside graft and other installed ones bring."""
        return entries(self.group)

    def is_foreign(self, name: str) -> bool:
        """Whether the part is of an installed package that is not graft's."""
        return name in self._foreign


def _module(part: Any) -> str:
    """The module of a "module:attr", or of an entry that is built from one."""
    place = getattr(part, "build", part)
    return place.partition(":")[0] if isinstance(place, str) else getattr(place, "__module__", "")
