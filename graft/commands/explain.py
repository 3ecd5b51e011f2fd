"""`graft explain WORD`: what a metric or label means, when it is healthy, what to try."""

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
    """Print what a metric or label means. When it is healthy, and what to try when it is not."""
    from graft.train.monitor.metric_docs import METRICS, PAGE
    from graft.train.monitor.metric_docs import explain as explain_word

    if not word:
        if as_json:
            tables = {"metrics": METRICS, "words": PAGE.words}
            listed = {
                key: [doc.to_json() for doc in table.values()] for key, table in tables.items()
            }
            typer.echo(json.dumps({**listed, "aliases": PAGE.aliases}))
            return
        width = max(map(len, METRICS))
        for heading, docs in {**PAGE.areas, "Other words": PAGE.words.values()}.items():
            typer.echo(heading)
            for doc in docs:
                typer.echo(f"  {doc.name:<{width}}  {_first_sentence(doc.what, WIDTH - width)}")
        short = ", ".join(f"{name} ({metric})" for name, metric in PAGE.aliases.items())
        typer.echo(_block("Short names: ", short))
        typer.echo("`graft explain WORD` prints the whole text of one")
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
    for number, case in enumerate(found.cases):
        typer.echo(_block(" " * 9 if number else "if not:  ", case))


def _first_sentence(text: str, width: int) -> str:
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
