"""`graft serve agent` and `graft serve search`: what other programs ask over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graft.commands.options import Overrides, Trust
from graft.commands.train import run_recipe
from graft.registry import load_service

serve = typer.Typer(help="Serve a policy to agents, or searches to rollouts.", no_args_is_help=True)


@serve.command("agent")
def serve_agent(
    source: Annotated[
        str,
        typer.Argument(
            metavar="[RECIPE|MODEL]",
            help="A recipe: agents elsewhere make its attempts. A model, run or hub name: it is served.",
        ),
    ] = "",
    overrides: Overrides = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; else agent.host, or 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="0 picks a free one; else agent.host's, or a free one."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Of a model: the file that gets the episodes; else agent-episodes.jsonl."
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Of a model's answers; else 1.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a model's answer; else 1024.")
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option(
            help="Instead of a model: a file with an answer on each line, to try an agent's tools."
        ),
    ] = None,
    trust: Trust = False,
) -> None:
    """Serve a policy to agents; record or train their attempts. Like OpenAI's and Anthropic's APIs."""
    from graft.commands.serve import (
        recipe_overrides,
        refuse_options,
        refuse_script,
        serve_model,
        serve_script,
    )

    options = {"--out": out, "--temperature": temperature, "--max-tokens": max_tokens}
    if script is not None or not source:
        file = refuse_script(source, overrides or [], script, temperature)
        at = host or "127.0.0.1", port or 0
        serve_script(file, *at, out or Path("agent-episodes.jsonl"), max_tokens)
    elif refuse_options(source, overrides or [], options):
        run_recipe(
            source, recipe_overrides(source, host, port, overrides or []), trust, as_json=False
        )
    else:
        at, drawn = (host or "127.0.0.1", port or 0), (temperature, max_tokens)
        serve_model(source, *at, out or Path("agent-episodes.jsonl"), *drawn, trust)


@serve.command("search")
def serve_search(
    corpus: Annotated[
        str, typer.Argument(help='A jsonl or parquet file, or "small"; none for a web source.')
    ] = "",
    source: Annotated[
        str, typer.Option(help="bm25, dense, or a web source: serpapi, google_cse, tavily, ...")
    ] = "",
    model: Annotated[str, typer.Option(help="The embedding model of a dense source.")] = "",
    index: Annotated[
        str, typer.Option(help="An existing faiss index file of the corpus, in its order.")
    ] = "",
    query_prefix: Annotated[
        str | None, typer.Option(help='Text before each query, such as "query: " for e5 models.')
    ] = None,
    topk: Annotated[
        int, typer.Option(min=1, help="Documents per query, unless a request says otherwise.")
    ] = 3,
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
) -> None:
    """Serve searches of a corpus or of the web. POST /retrieve, in Search-R1's JSON and in GEM's msgpack."""
    dense = {"model": model, "vectors": index, "query_prefix": query_prefix}
    load_service("serve_search")(corpus, source, dense, host=host, port=port, topk=topk)
