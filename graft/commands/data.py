"""`graft data VERB ...`: inspect rows, and make them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from graft.commands.options import (
    AsJson,
    Endpoint,
    EndpointApi,
    ModelRecipe,
    ServedModel,
    Temperature,
    Trust,
    Wrappers,
    progress,
)
from graft.registry import load_service

data = typer.Typer(help="Inspect rows, and make them.", no_args_is_help=True)
cache = typer.Typer(help="Answers of searches in ARPO's JSON form.", no_args_is_help=True)
data.add_typer(cache, name="cache")


@data.command()
def show(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="A file, a folder, SPLIT@PATH, or a dataset of the hub."
        ),
    ],
    layout: Annotated[str, typer.Option(help="The layout of the columns, where two fit.")] = "auto",
    purpose: Annotated[
        str, typer.Option("--for", help="task or chat, where rows may be either.")
    ] = "any",
    rows: Annotated[int, typer.Option(min=0, help="Rows to print.")] = 3,
    model: Annotated[str, typer.Option(help="Count its tokens too: a folder or .gguf file.")] = "",
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Count bad rows and leave them out.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print how a file of rows is read. How long rows are, and which are bad; exit 1: a run would stop."""
    from graft.data.show import inspect
    from graft.rewards.sources import SOURCES

    if purpose not in ("any", "task", "chat"):
        raise typer.BadParameter(f"{purpose!r} is none of any, task, chat", param_hint="--for")
    count = token_counter(model) if model else None
    found = inspect(source, layout, purpose, rows, count)  # type: ignore[arg-type]
    found.graded_sources = [name for name in found.sources if name in SOURCES]
    typer.echo(json.dumps(found.to_json()) if as_json else "\n".join(found.lines(skip_bad)))
    if not found.is_usable(skip_bad):
        raise typer.Exit(1)


@data.command()
def make(
    env_id: Annotated[
        str, typer.Argument(metavar="TASK", help="An environment, as `graft envs` lists them.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Its arguments: key=value; of its teacher: demo_args.key=value"),
    ] = None,
    out: Annotated[str, typer.Option(help="The file: .jsonl or .parquet.")] = "",
    n: Annotated[int, typer.Option("--n", min=1, help="Rows.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Rows depend on the seed alone.")] = 0,
    split: Annotated[
        str, typer.Option(help="train or test, by the environment's own rule.")
    ] = "train",
    form: Annotated[
        str, typer.Option(help="chats: demonstrations of its teacher. tasks: prompts with answers.")
    ] = "chats",
    wrappers: Wrappers = "",
    duplicates: Annotated[
        bool, typer.Option("--duplicates", help="Keep tasks that are drawn again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write tasks of an environment as rows. They are examples for `graft sft`, or questions with answers."""
    from graft.commands.envs import open_env
    from graft.config import ConfigError
    from graft.datagen.demonstrations import make_rows, share_out

    if not out:
        raise ConfigError("--out FILE is missing; give a name that ends in .jsonl or .parquet")
    of_env, teacher = share_out(env_id, overrides or [], split, progress)
    with closing(open_env(env_id, wrappers, of_env)) as env:
        made = make_rows(
            env_id,
            env,
            out,
            rows=n,
            seed=seed,
            split=split,
            form=form,
            duplicates=duplicates,
            teacher=teacher,
            say=progress,
        )
    typer.echo(json.dumps(made.to_json()) if as_json else made.sentence)


@data.command()
def sample(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A run, a checkpoint, a Hugging Face folder or a .gguf file; none: --endpoint.",
        ),
    ],
    env_id: Annotated[
        str, typer.Argument(metavar="ENV", help="An environment, as `graft envs` lists them.")
    ] = "",
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value of a recipe, as in rollout.max_turns=4")
    ] = None,
    out: Annotated[str, typer.Option(help="The file: .jsonl or .parquet.")] = "",
    n: Annotated[int, typer.Option("--n", min=1, help="Tasks.")] = 100,
    samples: Annotated[int, typer.Option(min=1, help="Attempts per task.")] = 8,
    keep: Annotated[
        str, typer.Option(help="On reward, turns, tool_calls, length and status.")
    ] = "reward>0",
    temperature: Temperature = None,
    recipe: ModelRecipe = "",
    seed: Annotated[int | None, typer.Option(min=0, help="Default: run.seed.")] = None,
    endpoint: Endpoint = None,
    model: ServedModel = "",
    api: EndpointApi = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue with the attempts that are stored.")
    ] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Let a model attempt tasks, and keep its good attempts. They are examples for `graft sft`."""
    from graft.config import ConfigError
    from graft.datagen.rejection_sampling import sample_rows
    from graft.evaluate.model_source import ModelSource
    from graft.rollout.options import RolloutOptions

    if not out:
        raise ConfigError("--out FILE is missing; give a name that ends in .jsonl or .parquet")
    changes = overrides or []
    # without a model the first argument is the environment
    if endpoint and (not env_id or "=" in env_id):
        source, env_id, changes = "", source, [*([env_id] if env_id else []), *changes]
    if not env_id:
        raise typer.BadParameter(
            "give an environment, as `graft envs` lists them", param_hint="ENV"
        )
    sampled = sample_rows(
        ModelSource(source, recipe, changes, endpoint or (), model, api, trust),
        env_id,
        out,
        RolloutOptions(tasks=n, samples=samples, seed=seed, temperature=temperature),
        keep=keep,
        resume=resume,
        say=progress,
    )
    typer.echo(json.dumps(sampled.to_json()) if as_json else sampled.sentence)


@cache.command("import")
def import_answers(
    source: Annotated[
        str, typer.Argument(metavar="FILE", help="A search_cache.json: query -> result.")
    ],
    to: Annotated[
        str, typer.Option(help="The cache file of the search tool. Default: FILE with .db.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Store the results of a search_cache.json in a cache file: {search: {cache: FILE.db}} then uses them."""
    if not Path(source).is_file():
        raise typer.BadParameter(f"there is no file {source!r}", param_hint="FILE")
    target = Path(to or Path(source).with_suffix(".db"))
    done = load_service("import_search_cache")(source, target)
    line = {"cache": str(target), **asdict(done)}
    typer.echo(json.dumps(line) if as_json else f"{target}: {done.sentence}")
    if not done.stored:
        raise typer.Exit(1)


@cache.command("export")
def export_answers(
    source: Annotated[
        str, typer.Argument(metavar="CACHE", help="A cache file of the search tool.")
    ],
    to: Annotated[str, typer.Option(help="The JSON file. Default: CACHE with .json.")] = "",
    as_json: AsJson = False,
) -> None:
    """Write a cache file as a search_cache.json, with the latest answer to each query."""
    target = Path(to or Path(source).with_suffix(".json"))
    count = load_service("export_search_cache")(source, target)
    line = {"file": str(target), "queries": count}
    typer.echo(json.dumps(line) if as_json else f"{target}: {count:,} queries")


def token_counter(model: str) -> Callable[[str], int]:
    """The number of tokens of a text for a model, without those of a chat template."""
    from graft.models.io.gguf_read import open_tokenizer
    from graft.train.run_dir.checkpoint import latest_model

    encode = open_tokenizer(latest_model(model, weights=False)).encode
    return lambda text: len(encode(text))
