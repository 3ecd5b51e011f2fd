"""`graft config`, `graft envs`, `graft recipes`, `graft play`: what there is, before anything is trained."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Annotated

import typer

from graft.commands.options import AsJson, Overrides, Wrappers


def config(
    recipe: Annotated[str, typer.Argument(help="A YAML file or a bundled recipe.")] = "",
    overrides: Overrides = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every key and what it means.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print a recipe with every default filled in, or list the keys."""
    from graft.config import ConfigError, load_config
    from graft.config import keys as all_keys

    if keys:
        documented = all_keys()
        width = max(map(len, documented))
        lines = [f"{key:<{width}}  {text}" for key, text in documented.items()]
        typer.echo(json.dumps(documented) if as_json else "\n".join(lines))
        return
    if not recipe:
        raise ConfigError("give a recipe, or --keys for the list of keys")
    resolved = load_config(recipe, overrides or [])
    if as_json:
        typer.echo(json.dumps(resolved.written()))
        return
    from graft.config import dump_config

    typer.echo(dump_config(resolved), nl=False)


def envs(
    pattern: Annotated[str, typer.Argument(help="Only ids that contain this text.")] = "",
    as_json: AsJson = False,
) -> None:
    """List the environments: turns, needs, whether they can run here."""
    from graft.commands.envs import list_envs, table

    rows = list_envs(pattern)
    typer.echo(json.dumps({"envs": rows}) if as_json else "\n".join(table(rows)))


def recipes(
    pattern: Annotated[str, typer.Argument(help="Only names that contain this text.")] = "",
    as_json: AsJson = False,
) -> None:
    """List the bundled recipes and what each needs. Of one: how it is started."""
    from graft.commands.recipes import list_recipes, table

    rows = list_recipes(pattern)
    typer.echo(json.dumps({"recipes": rows}) if as_json else "\n".join(table(rows)))


def play(
    env_id: Annotated[str, typer.Argument(metavar="ID", help="As `graft envs` lists them.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the environment: key=value")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed, the same task.")] = None,
    wrappers: Wrappers = "",
    as_json: AsJson = False,
) -> None:
    """Play an environment yourself: type actions, see the rewards."""
    from graft.commands.envs import open_env
    from graft.commands.envs import play as play_env

    with closing(open_env(env_id, wrappers, overrides or [])) as env:
        result = play_env(env, seed)
    if as_json:
        typer.echo(json.dumps(result))
