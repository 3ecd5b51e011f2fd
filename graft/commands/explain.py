"""`graft explain METRIC`: what a number means, when it is healthy, what to try when it is not."""

from __future__ import annotations

import json
import textwrap
from typing import Annotated

import typer

from graft.commands.options import AsJson

WIDTH = 96


def explain(
    metric: Annotated[
        str, typer.Argument(help="A name of metrics.jsonl, such as entropy; none: list them all.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Say what a metric means, when it is healthy, and what to try when it is not."""
    from graft.train.explain import AREAS, METRICS
    from graft.train.explain import explain as explain_metric

    if not metric:
        if as_json:
            typer.echo(json.dumps({"metrics": [entry.to_json() for entry in METRICS.values()]}))
            return
        width = max(map(len, METRICS))
        for heading, entries in AREAS.items():
            typer.echo(heading)
            for entry in entries:
                typer.echo(f"  {entry.name:<{width}}  {_begin(entry.what, WIDTH - width)}")
        typer.echo("`graft explain METRIC` says the rest")
        return
    found = explain_metric(metric)
    if as_json:
        typer.echo(json.dumps(found.to_json()))
        return
    typer.echo(found.name)
    typer.echo(_block("", found.what))
    typer.echo(_block("healthy: ", found.healthy))
    if found.remedy:
        typer.echo(_block("if not:  ", found.remedy))


def _begin(text: str, width: int) -> str:
    short = textwrap.shorten(text, width, placeholder=" ...", break_on_hyphens=False)
    return short.partition(". ")[0]


def _block(title: str, text: str) -> str:
    return textwrap.fill(
        f"{title}{text}",
        WIDTH,
        initial_indent="  ",
        subsequent_indent=" " * (2 + len(title)),
        break_on_hyphens=False,
        break_long_words=False,  # a name that is cut cannot be copied
    )
