"""`graft view RUN [RUN ...]`: a live page of runs in the browser; `graft report`: the page as one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from graft.commands.options import AsJson


def view(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Run folders, or a folder of them.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 0,
    host: Annotated[
        str, typer.Option(help="A loopback address; no other is served.")
    ] = "127.0.0.1",
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Print the address and open nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show runs in the browser. Curves, steps, episodes as trees, every token with its numbers."""
    from graft.config import ConfigError
    from graft.http import is_loopback
    from graft.serving.guard import new_token
    from graft.serving.listening import address_of, listening
    from graft.viewer.runs import open_runs
    from graft.viewer.server import serve

    if not is_loopback(host):
        raise ConfigError(
            f"--host {host}: runs are shown on this machine only. From another one, forward the port: "
            "ssh -L 8000:127.0.0.1:8000 THIS_MACHINE, and here graft view RUN --port 8000"
        )
    opened = open_runs(runs)
    token = new_token()
    with listening(host, port) as listener:
        url = f"{address_of(listener)}/?token={token}"

        def ready() -> None:
            if as_json:
                answer = {
                    "url": url,
                    "port": listener.getsockname()[1],
                    "runs": [str(run.path) for run in opened],
                }
                typer.echo(json.dumps(answer))
            else:
                names = ", ".join(run.name for run in opened)
                typer.echo(f"showing {names}\n  {url}\nend with Ctrl-C")
            if not no_browser:
                _open_browser(url)

        serve(opened, listener, token, ready)


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
    """Save the viewer's page as one HTML file. Scores, curves, best and worst tasks, settings, time.

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


def _open_browser(url: str) -> None:
    """Open it in a thread: some browsers block the process that starts them."""
    import threading
    import webbrowser

    threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
