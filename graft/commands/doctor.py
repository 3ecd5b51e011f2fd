"""`graft doctor`: checks before money is spent, of this machine and of a recipe on it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from graft.commands.options import AsJson, Overrides


def doctor(
    recipe: Annotated[
        str, typer.Argument(help="A YAML file or a bundled recipe; none: the machine alone.")
    ] = "",
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine and, where one is given, a recipe on it. Exit 1: something has failed."""
    from graft.config import ConfigError, load_config
    from graft.doctor import FAIL, WARN, report

    if "=" in recipe:
        raise ConfigError(f"{recipe!r} changes a recipe; name the recipe first")
    config = load_config(recipe, overrides or []) if recipe else None
    checks = report(lambda line: typer.echo(line, err=as_json), config)
    failed = sum(check.verdict == FAIL for check in checks)
    if config is not None:
        warned = sum(check.verdict == WARN for check in checks)
        fine = len(checks) - failed - warned
        typer.echo(f"{fine} passed, {warned} to look at, {failed} failed", err=as_json)
    if as_json:
        told: dict[str, Any] = {"checks": [check.to_json() for check in checks]}
        if config is not None:
            told = {"recipe": recipe, "is_ready": not failed, **told}
        typer.echo(json.dumps(told))
    if failed:
        raise typer.Exit(1)
