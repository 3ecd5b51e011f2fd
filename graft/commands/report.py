"""`graft report RUN`: one HTML file about a run, to read or to send."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from graft.commands.options import AsJson
from graft.commands.runs import Run


def report(
    run: Run,
    out: Annotated[str, typer.Option(help="The file to write. Default: RUN/report.html.")] = "",
    as_json: AsJson = False,
) -> None:
    """Write one HTML file: result, curves, best and worst attempts, settings, time."""
    from graft.config import ConfigError
    from graft.record import find_run
    from graft.report.page import write_report

    record = find_run(run)
    target = Path(out) if out else None
    if target is not None and target.is_dir():
        raise ConfigError(f"--out '{out}' is a folder; give a file, such as {target}/report.html")
    if target is not None and not target.parent.is_dir():
        raise ConfigError(f"--out '{out}': there is no folder '{target.parent}'; make it first")
    path = write_report(record, target)
    if as_json:
        told = {
            "report": str(path),
            "bytes": path.stat().st_size,
            "status": str(record.status),
        }
        typer.echo(json.dumps(told))
    else:
        typer.echo(str(path))
