"""`graft doctor`: checks of this machine and of a recipe, each a line with its remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING

from graft.doctor.machine import examine
from graft.train.monitor.check import FAIL, PASS, WARN, Check

if TYPE_CHECKING:
    from graft.config import Config

__all__ = ["FAIL", "PASS", "WARN", "Check", "examine", "report"]


def report(say: Callable[[str], None], config: Config | None = None) -> list[Check]:
    """Every check of the machine and, where one is given, of a recipe; each is reported when it is done."""
    checks = examine()
    if config is not None:
        from graft.doctor.recipe import examine_recipe

        checks = chain(checks, examine_recipe(config))
    return say_all(checks, say)


def say_all(checks: Iterable[Check], say: Callable[[str], None]) -> list[Check]:
    """All checks; each is reported when it is done."""
    found: list[Check] = []
    for check in checks:
        say(str(check))
        found.append(check)
    return found
