"""The one command: `graft VERB ...`. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from graft.commands.data import data
from graft.commands.doctor import doctor
from graft.commands.errors import complain
from graft.commands.evaluate import evaluate
from graft.commands.explain import explain
from graft.commands.export import export
from graft.commands.generate import generate
from graft.commands.init import init
from graft.commands.listing import config, envs, play, recipes
from graft.commands.plan import plan
from graft.commands.replay import replay
from graft.commands.rollout import rollout
from graft.commands.runs import runs, watch
from graft.commands.scale import scale
from graft.commands.services import serve
from graft.commands.train import sft, train
from graft.commands.translate import translate
from graft.commands.view import report, view
from graft.trust.masking import mask_terminal

app = typer.Typer(
    name="graft",
    help="Train language-model agents with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from graft.version import __version__

        typer.echo(f"graft {__version__}")
        raise typer.Exit


for command in (init, train, sft, config, generate, envs, recipes, play):
    app.command()(command)
app.add_typer(serve, name="serve")
app.add_typer(data, name="data")
app.command("eval")(evaluate)
app.command(context_settings={"ignore_unknown_options": True})(translate)
for command in (rollout, export, plan, explain, runs, watch, report, view, doctor, replay, scale):
    app.command()(command)


def main() -> None:
    """Entry point: errors that a user can act on are one line; anything else is a bug, shown in full."""
    # torch's threads spin while they wait; with one busy process beside them a step was
    # sixteen times slower (4.1 s for 0.24 s), and on a quiet machine spinning gained nothing
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # torch logs lost connections from C++ before graft can say which process is lost and why
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    mask_terminal()
    try:
        code = app(standalone_mode=False)  # typer returns an exit code instead of raising it
        sys.exit(code if isinstance(code, int) else 0)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except Exception as error:
        sys.exit(complain(error))


if __name__ == "__main__":
    main()
