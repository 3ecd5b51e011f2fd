"""`graft doctor`: checks of this machine, and of a recipe on it, before training."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from graft.commands.options import AsJson, Overrides, Trust


def doctor(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A YAML file or a bundled recipe, or an environment that tries its tasks (terminal); "
            "without it only the machine is checked."
        ),
    ] = "",
    overrides: Overrides = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Check this machine and, where one is given, a recipe on it. Exit 1: a check failed."""
    from graft.config import ConfigError, load_config
    from graft.doctor import FAIL, WARN, report, say_all
    from graft.doctor.tasks import can_check, task_checks
    from graft.train.monitor.printable import visible
    from graft.trust.ownership import settings_from

    if "=" in recipe:
        raise ConfigError(f"{recipe!r} changes a recipe; name the recipe first")

    def say(line: str) -> None:
        typer.echo(visible(line), err=as_json)

    given, has_tasks = overrides or [], can_check(recipe)
    with settings_from("" if has_tasks else recipe, trust, given):
        if has_tasks:
            checks = say_all(task_checks(recipe, given), say)
        else:
            checks = report(say, load_config(recipe, given) if recipe else None)
    failed = sum(check.verdict == FAIL for check in checks)
    if recipe:
        warned = sum(check.verdict == WARN for check in checks)
        fine = len(checks) - failed - warned
        typer.echo(f"{fine} passed, {warned} warnings, {failed} failed", err=as_json)
    if as_json:
        answer: dict[str, Any] = {"checks": [check.to_json() for check in checks]}
        if recipe:
            answer = {"recipe": recipe, "is_ready": not failed, **answer}
        typer.echo(json.dumps(answer))
    if failed:
        raise typer.Exit(1)
