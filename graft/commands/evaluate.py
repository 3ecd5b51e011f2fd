"""`graft eval MODEL_OR_RUN ...`: scores on held-out tasks, with intervals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from graft.commands.options import (
    AsJson,
    Endpoint,
    EndpointApi,
    ModelRecipe,
    Overrides,
    ServedModel,
    Temperature,
    Trust,
    progress,
    read_temperature,
)


def evaluate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_RUN",
            help="A run, a checkpoint of one, or a model; with --endpoint its name, or none.",
        ),
    ] = "",
    overrides: Overrides = None,
    on: Annotated[
        str,
        typer.Option(
            help="Sets: benchmarks, env ids, or LABEL=ID, with commas. Default: the run's own."
        ),
    ] = "",
    args: Annotated[
        list[str] | None, typer.Option("--args", help="LABEL.key=value: arguments of one set.")
    ] = None,
    k: Annotated[str, typer.Option("--k", help="pass@k and maj@k: 8, or 1,4,8.")] = "",
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Attempts per task. Default: the largest k, else a row's pass@k."),
    ] = None,
    tasks: Annotated[
        int | None,
        typer.Option(min=1, help="Per set. Default: a whole benchmark, else run.eval_tasks."),
    ] = None,
    temperature: Temperature = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Nucleus; 1 keeps every token.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", help="Likeliest tokens; 0 keeps every token.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option("--min-p", help="Share of the largest probability; 0: off.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option("--repetition-penalty", help="1: off.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Sampled tokens per turn.")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Temperature 0.")] = False,
    solved: Annotated[
        float, typer.Option(help="The least reward of a right attempt (pass@k).")
    ] = 1.0,
    no_tools: Annotated[
        bool, typer.Option("--no-tools", help="The same tasks without tools.")
    ] = False,
    prompt: Annotated[
        str,
        typer.Option(
            help="ARPO's system prompt: code_search, search, math, base, code_search_cn, or a file."
        ),
    ] = "",
    all_checkpoints: Annotated[
        bool, typer.Option("--all-checkpoints", help="All of them, not only the newest.")
    ] = False,
    recipe: ModelRecipe = "",
    endpoint: Endpoint = None,
    model: ServedModel = "",
    api: EndpointApi = "",
    against: Annotated[
        str, typer.Option(help="An earlier evaluation to compare with: its JSON file or folder.")
    ] = "",
    name: Annotated[str, typer.Option(help="Name of the files under RUN/evaluations.")] = "table",
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Score models on held-out tasks, as one table. Run it again to complete what is missing."""
    from graft.config import ConfigError
    from graft.evaluate.model_source import ModelSource
    from graft.evaluate.options import EvalOptions
    from graft.evaluate.run import evaluate_checkpoints
    from graft.train.monitor.printable import visible

    if not math.isfinite(solved):
        raise ConfigError(f"--solved {solved:g}: give the least reward of a right attempt")
    changes = overrides or []
    # without a model the arguments are overrides
    if endpoint and "=" in source and not Path(source).exists():
        source, changes = "", [source, *changes]
    table, folder, compared = evaluate_checkpoints(
        ModelSource(source, recipe, changes, endpoint or (), model, api, trust),
        EvalOptions(
            on=on,
            args=args or (),
            k=read_k(k),
            samples=samples,
            tasks=tasks,
            temperature=read_temperature(temperature, greedy),
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            max_tokens=max_tokens,
            solved=solved,
            tools=not no_tools,
            prompt=prompt,
        ),
        every_checkpoint=all_checkpoints,
        against=against,
        name=name,
        say=progress,
    )
    if as_json:
        more = {} if compared is None else {"comparison": compared.to_json()}
        answer = {"folder": str(folder), **table.to_json(with_tasks=False), **more}
        typer.echo(json.dumps(answer))
    else:
        typer.echo(table.markdown(), nl=False)
        if compared is not None:
            typer.echo(f"\n{compared.markdown()}", nl=False)
    for problem in table.problems:
        typer.echo(f"graft: {visible(problem)}", err=True)
    if table.problems:
        raise typer.Exit(1)


def read_k(text: str) -> list[int]:
    """
    >>> read_k("8,1"), read_k("")
    ([8, 1], [])
    """
    from graft.config import ConfigError

    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() and int(part) for part in parts):
        raise ConfigError(f"--k {text!r}: give whole numbers of 1 or more, such as 8 or 1,4,8")
    return [int(part) for part in parts]
