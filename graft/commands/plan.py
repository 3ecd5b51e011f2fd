"""`graft plan`: memory and time of a recipe on this device."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from graft.commands.options import AsJson, Overrides, Trust


def plan(
    recipe: Annotated[str, typer.Argument(help="A YAML file or a bundled recipe.")],
    overrides: Overrides = None,
    no_probe: Annotated[
        bool, typer.Option("--no-probe", help="Compute only; measure nothing.")
    ] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Estimate the memory and time of a recipe on this device. Exit code 1: it does not fit."""
    from graft.config import load_config
    from graft.planning.forecast import forecast
    from graft.planning.report import show_forecast
    from graft.recipe.admission import NOT_OF_A_PLAN
    from graft.trust.ownership import settings_from

    with settings_from(recipe, trust, overrides or []):
        config = load_config(recipe, overrides or [], unused=NOT_OF_A_PLAN)
        found = forecast(config, probing=not no_probe)
    if as_json:
        typer.echo(json.dumps(found.to_json()))
    else:
        show_forecast(found)
    if not found.memory.fits:
        raise typer.Exit(1)
