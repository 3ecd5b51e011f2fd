"""Which code is graft's: the package itself and the packages in its wheel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

PACKAGES = ("graft", "graft_envs", "graft_interop", "graft_sandbox", "graft_search")
ROOT = Path(__file__).parent.parent
FOLDERS = tuple(f"{ROOT / name}{os.sep}" for name in PACKAGES)


def is_ours(thing: Any) -> bool:
    """Whether a class, function or module name belongs to one of graft's packages."""
    module = thing if isinstance(thing, str) else getattr(thing, "__module__", None) or ""
    return module.partition(".")[0] in PACKAGES
