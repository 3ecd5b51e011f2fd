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
            help="A YAML file or a bundled recipe; without one only the machine is checked."
        ),
    ] = "",
    overrides: Overrides = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Check this machine and, where one is given, a recipe on it. Exit 1: a check failed."""
    from graft.config import ConfigError, load_config
    from graft.doctor import FAIL, WARN, report
    from graft.train.monitor.formatting import visible
    from graft.trust.ownership import settings_from

    if "=" in recipe:
        raise ConfigError(f"{recipe!r} changes a recipe; name the recipe first")
    with settings_from(recipe, trust, overrides or []):
        config = load_config(recipe, overrides or []) if recipe else None
        checks = report(lambda line: typer.echo(visible(line), err=as_json), config)
    failed = sum(check.verdict == FAIL for check in checks)
    if config is not None:
        warned = sum(check.verdict == WARN for check in checks)
        fine = len(checks) - failed - warned
        typer.echo(f"{fine} passed, {warned} warnings, {failed} failed", err=as_json)
    if as_json:
        answer: dict[str, Any] = {"checks": [check.to_json() for check in checks]}
        if config is not None:
            answer = {"recipe": recipe, "is_ready": not failed, **answer}
        typer.echo(json.dumps(answer))
    if failed:
        raise typer.Exit(1)
