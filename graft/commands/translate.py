"""`graft translate`: a recipe from a command line, a script, Python or YAML of TRL or verl."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from graft.commands.options import AsJson

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="SETTINGS",
        help="A file (.sh, .py, .yaml), their command line itself, or - for standard input.",
    ),
]


def translate(words: Words, as_json: AsJson = False) -> None:
    """Write a recipe from the settings of TRL or verl. Nothing of theirs is run."""
    import yaml

    from graft.config import ConfigError, check, keys
    from graft.registry import load_service

    text, ending = _read(words)
    made = load_service("translate_settings")(text, ending, keys())
    if made is None:
        raise ConfigError(
            f"no setting was found in {words[0]!r}: give a file that exists, flags (--learning_rate 1e-6), "
            "keys (data.train_batch_size=256) or a call such as GRPOConfig(learning_rate=1e-6)"
        )
    problem = ""
    try:
        check(made.recipe, where="the recipe")
    except ConfigError as error:
        problem = str(error)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "library": made.library,
                    "recipe": made.recipe,
                    "left": made.left,
                    "problem": problem,
                }
            )
        )
        raise typer.Exit(1 if problem else 0)
    typer.echo(f"# From settings of {made.library}, with its defaults where graft's differ.")
    typer.echo(
        yaml.safe_dump(made.recipe, sort_keys=False, default_flow_style=None, width=100), nl=False
    )
    if made.left:
        typer.echo("\n# Not in this recipe:")
    for key, why in made.left.items():
        typer.echo(f"# {key}: {' '.join(why.split())}")
    if problem:
        typer.echo(f"graft: it cannot be trained yet: {problem}", err=True)
        raise typer.Exit(1)


def _read(words: list[str]) -> tuple[str, str]:
    """The text, and the ending of the file that it is from."""
    from graft.trust.bounds import MAX_YAML, read_text

    if words == ["-"]:
        return sys.stdin.read(MAX_YAML), ""
    if len(words) == 1 and Path(words[0]).is_file():
        return read_text(Path(words[0]), MAX_YAML), Path(words[0]).suffix.lower()
    return (words[0] if len(words) == 1 else shlex.join(words)), ""
