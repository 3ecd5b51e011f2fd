"""`graft train` and `graft sft`: run a recipe, here, in torchrun's processes or on a cluster."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from graft.commands.errors import error_text
from graft.commands.options import AsJson, Overrides

TrustState = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Train from the config.yaml of a run that you did not start.",
    ),
]
Recipe = Annotated[str, typer.Argument(help="A YAML file, or the name of a bundled recipe.")]


def train(
    recipe: Recipe, overrides: Overrides = None, trust: TrustState = False, as_json: AsJson = False
) -> None:
    """Run a recipe: warm-up if it has one, then RL. Run it again to resume."""
    run_recipe(recipe, overrides or [], trust, as_json)


def sft(
    recipe: Recipe, overrides: Overrides = None, trust: TrustState = False, as_json: AsJson = False
) -> None:
    """Run only the supervised part of a recipe."""
    run_recipe(recipe, [*(overrides or []), "train.steps=0"], trust, as_json)


def run_recipe(recipe: str, overrides: list[str], trust: bool, as_json: bool) -> None:
    from graft.config import load_config
    from graft.trust.ownership import settings_from

    with settings_from(recipe, trust, overrides, is_trained=True):
        _run_config(load_config(recipe, overrides), as_json)


def _run_config(config: Any, as_json: bool) -> None:
    from graft.models.device_choice import choose_device
    from graft.train.distributed.process_group import ProcessGroup

    if config.cluster.address:
        from graft.cluster.supervisor import train_on_cluster
        from graft.train.monitor.display import Display

        with Display(config.train.steps, json=as_json) as display:
            finished = train_on_cluster(config, display)
        _show(display, finished, finished.summary)
        if as_json:
            typer.echo(json.dumps(finished.summary))
        return
    device = choose_device(config.model.device)
    with (
        ProcessGroup.start(config.parallel.deadline, device) as processes,
        processes.guarded(error_text),
    ):
        _train(config, as_json, processes)


def _train(config: Any, as_json: bool, processes: Any) -> None:
    from graft.train.monitor.display import Display
    from graft.train.session import Session

    display = Display(config.train.steps, json=as_json, quiet=not processes.is_first)
    session = Session(config, display, processes)
    try:
        with display:
            summary = session.train()
    except KeyboardInterrupt:
        if processes.failure is not None:
            raise  # the failure of another process arrives like this; it is reported elsewhere
        display.note(session.folder.interruption_note())
        raise
    if not processes.is_first:
        return
    _show(display, session, summary)
    if as_json:
        typer.echo(json.dumps(summary))


def _show(display: Any, session: Any, summary: dict[str, Any]) -> None:
    """Print scores, three attempts, and the next commands."""
    from graft.train.run_dir.names import short

    leakage = summary.get("leakage") or {}
    display.table(summary.get("before", {}), summary.get("after", {}), leakage.get("note", ""))
    for number, episode in enumerate(session.episodes[:3], 1):
        display.note(f"held-out attempt {number}")
        display.transcript(episode, leaf=0)
    run, command = short(session.folder.path), _command()
    has_env = session.folder.config.task.env
    see = f"rollout {run}" if has_env else f"generate {run} --prompt '...'"
    display.closing(session.folder.path, [f"{command} {see}", f"{command} view {run}"])


def _command() -> str:
    """How this program was called: graft, or .venv/bin/graft without an activated environment."""
    called = Path(sys.argv[0])
    found = shutil.which("graft")
    if called.name != "graft" or (found and Path(found).resolve() == called.resolve()):
        return "graft"
    return min(str(called), os.path.relpath(called), key=len)
