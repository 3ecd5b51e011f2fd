"""`graft report RUN [RUN ...]`: the page of `graft view` as one HTML file, to keep or to send."""

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
            help="A run's folder, or its name in runs/; several are compared, seeds are averaged.",
        ),
    ],
    out: Annotated[
        str, typer.Option(help="The file to write. Default: report.html in the (first) run.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Save the viewer's page as one HTML file: scores, curves, best and worst tasks, settings, time.

    The file opens in any browser without graft and loads nothing from the network.
    """
    from graft.config import ConfigError
    from graft.viewer.runs import open_runs
    from graft.viewer.saved import save_page

    opened = open_runs(runs)
    path = Path(out) if out else opened[0].path / "report.html"
    if path.is_dir():
        raise ConfigError(f"--out '{out}' is a folder; give a file, such as {path}/report.html")
    if not path.parent.is_dir():
        raise ConfigError(f"--out '{out}': there is no folder '{path.parent}'; make it first")
    save_page(opened, path)
    if as_json:
        about = {
            "report": str(path),
            "bytes": path.stat().st_size,
            "status": str(opened[0].record.status),
            "runs": [str(run.path) for run in opened],
        }
        typer.echo(json.dumps(about))
    else:
        typer.echo(str(path))
