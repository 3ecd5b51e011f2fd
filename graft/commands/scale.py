"""`graft scale RUN N`: change the number of Ray workers that sample for a run while it trains.

$ graft scale runs/quickstart 4
runs/quickstart will have 4 workers

The number is written into the run's folder, where the learner reads it several times a second. Surplus
workers finish their episodes and end. The number holds until the training command ends; the next one
starts with cluster.workers again.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from graft.commands.options import AsJson, Run


def scale(
    run: Run,
    workers: Annotated[int, typer.Argument(metavar="N", help="Processes that sample.")],
    as_json: AsJson = False,
) -> None:
    """Change the number of workers that sample for a run on a cluster."""
    from graft.cluster.scale_file import SCALE
    from graft.config import ConfigError
    from graft.files import write_json
    from graft.runs import RunStatus, find_run
    from graft.train.run_dir.folder import out_of_disk

    if workers < 1:
        raise ConfigError(
            f"N={workers}: a run needs at least one worker; stop its command to stop all"
        )
    record = find_run(run)
    if not record.config.get("cluster", {}).get("address"):
        raise ConfigError(
            f"{record.path} samples in its own processes: its recipe has no cluster.address, so there are no "
            "workers to count. Start it on Ray with cluster.address=local (or auto, or host:port)"
        )
    with out_of_disk(record.path):
        write_json(record.path / SCALE, {"workers": workers})
    is_running = record.status is RunStatus.RUNNING
    if as_json:
        answer = {"run": str(record.path), "workers": workers, "is_running": is_running}
        typer.echo(json.dumps(answer))
        return
    typer.echo(f"{record.path} will have {workers} worker{'s'[: workers != 1]}")
    if not is_running:
        typer.echo(
            "graft: no process of this machine runs it now; a new command begins with "
            "cluster.workers, not with this number",
            err=True,
        )
