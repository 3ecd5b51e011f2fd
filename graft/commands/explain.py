"""`graft explain WORD`: what a number or a word beside it means, when it is healthy, what to try."""

from __future__ import annotations

import json
import textwrap
from typing import Annotated

import typer

from graft.commands.options import AsJson

WIDTH = 96


def explain(
    word: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORD",
            help="A metric, or any word that a command prints: entropy, spread, held out, pass@8.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a metric or a printed word means, when it is healthy, and what to try when it is not."""
    from graft.train.monitor.metric_docs import ALIASES, AREAS, METRICS, WORDS
    from graft.train.monitor.metric_docs import explain as explain_word

    if not word:
        if as_json:
            listed = {"metrics": METRICS, "words": WORDS}
            told = {key: [entry.to_json() for entry in of.values()] for key, of in listed.items()}
            typer.echo(json.dumps({**told, "aliases": ALIASES}))
            return
        width = max(map(len, METRICS))
        for heading, entries in {**AREAS, "Words that are no metric": WORDS.values()}.items():
            typer.echo(heading)
            for entry in entries:
                typer.echo(f"  {entry.name:<{width}}  {_begin(entry.what, WIDTH - width)}")
        typer.echo(
            _block("Short for a metric: ", ", ".join(f"{a} ({m})" for a, m in ALIASES.items()))
        )
        typer.echo("`graft explain WORD` says the rest")
        return
    typed = " ".join(word)
    found = explain_word(typed)
    if as_json:
        typer.echo(json.dumps(found.to_json()))
        return
    typer.echo(found.name if found.name == typed else f"{typed}: {found.name}")
    typer.echo(_block("", found.what))
    if found.healthy:
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
