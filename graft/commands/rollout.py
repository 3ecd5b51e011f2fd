"""`graft rollout RUN`: watch a trained agent work on one task, tools included.

$ graft rollout quickstart
task    97+53-63=
policy  [97+53]
env     150;
policy  [150-63]
env     87;
policy  87
reward  1.00 (done)
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from graft.commands.options import (
    AsJson,
    ModelRecipe,
    Overrides,
    Temperature,
    Trust,
    read_temperature,
)


def rollout(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run by name or folder, a checkpoint, or a model with --env."
        ),
    ],
    overrides: Overrides = None,
    task: Annotated[
        str | None, typer.Option(help="Your own task, where the environment asks one question.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Which held-out task: 0, 1, 2, ... Default: 0.")
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Attempts at the task.")] = 1,
    temperature: Temperature = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Temperature 0.")] = False,
    env: Annotated[str, typer.Option(help="Another environment, as `graft envs` lists them.")] = "",
    recipe: ModelRecipe = "",
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Let a trained policy attempt one task with its tools. Prints the conversation."""
    from graft.config import ConfigError
    from graft.datagen.single_task import attempt
    from graft.evaluate.model_source import ModelSource
    from graft.rollout.options import RolloutOptions
    from graft.train.monitor.display import Display
    from graft.train.monitor.printable import visible

    if task is not None and not task.strip():
        raise ConfigError("--task is empty; write the task, or leave --task out for a held-out one")
    if task and seed is not None:
        raise ConfigError(f"--task and --seed {seed} each choose a task; give one of them")
    made = attempt(
        ModelSource(source, recipe, overrides or (), trust=trust),
        RolloutOptions(
            samples=n, seed=seed or 0, temperature=read_temperature(temperature, greedy)
        ),
        env=env,
        text=task or "",
    )
    for note in made.notes:
        typer.echo(note, err=True)
    if as_json:
        typer.echo(json.dumps(made.to_json()))
    else:
        display = Display(0)
        for leaf in range(len(made.episode.leaves)):
            if n > 1:
                display.note(f"attempt {leaf + 1} of {n}")
            display.transcript(made.episode, leaf, is_graded=made.is_graded, is_whole=True)
    for error in made.errors:
        typer.echo(f"graft: the attempt failed: {visible(str(error))}", err=True)
    if len(made.errors) == len(made.episode.leaves):
        raise typer.Exit(1)
