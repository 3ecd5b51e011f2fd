"""`graft report RUN [RUN ...]`: one HTML file about a run, or several seeds of it, to read or to send."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from graft.commands.options import AsJson


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="A run's folder, or its name in runs/; several: seeds of the same recipe.",
        ),
    ],
    out: Annotated[
        str, typer.Option(help="The file to write. Default: report.html in the (first) run.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Write one HTML file: result, curves, best and worst attempts, settings, time.

    Of several seeds of one recipe: scores and curves as means with their spread.
    """
    from graft.config import ConfigError
    from graft.report.page import write_report
    from graft.runs import find_run

    record, *others = records = [find_run(run) for run in runs]
    target = Path(out) if out else None
    if target is not None and target.is_dir():
        raise ConfigError(f"--out '{out}' is a folder; give a file, such as {target}/report.html")
    if target is not None and not target.parent.is_dir():
        raise ConfigError(f"--out '{out}': there is no folder '{target.parent}'; make it first")
    path = write_report(record, target, others)
    if as_json:
        told = {
            "report": str(path),
            "bytes": path.stat().st_size,
            "status": str(record.status),
            "runs": [str(one.path) for one in records],
        }
        typer.echo(json.dumps(told))
    else:
        typer.echo(str(path))
