"""Which recipes are the user's by where they are: in the folder where the user stands, or below it.

graft cannot know who wrote a file. A recipe below the working folder counts as written by the user if nobody
else could have put it there: the user owns it and every folder on the way, and others can write none of them.
What the user unpacked or cloned there is the user's too; a run's config.yaml therefore needs a signature.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

SETTINGS = "config.yaml"
"""The settings of a run, in its folder."""
PARTS = ("checkpoints", "metrics.jsonl", "episodes", "summary.json")
"""What a run's folder has besides its settings."""


def is_of_run(file: Path) -> bool:
    """Whether these are the settings of a run, not a recipe that somebody named config.yaml."""
    path = file.resolve()
    return path.name == SETTINGS and any((path.parent / part).exists() for part in PARTS)


def why_not_mine(recipe: Path) -> str:
    """Why a recipe (a path without links) may be another's; "": only the user can have put it there."""
    here = Path.cwd().resolve()
    if not recipe.is_relative_to(here):
        return f"it is not in {here}, where you are, and you have not trained it yet"
    around = [folder for folder in recipe.parents if folder.is_relative_to(here)]
    for place in (recipe, *around):
        facts = place.stat()
        if facts.st_uid != os.geteuid():
            return f"'{place}' belongs to another user"
        if facts.st_mode & stat.S_IWOTH or (
            facts.st_mode & stat.S_IWGRP and not _is_users_alone(facts.st_gid)
        ):
            return f"others can write to '{place}'"
    return ""


def _is_users_alone(group: int) -> bool:
    """Whether a group has only this user, as the groups that many systems make with each user."""
    import grp
    import pwd

    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name}
