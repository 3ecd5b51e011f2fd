"""`graft view RUN [RUN ...]`: a page in the browser that shows runs, live."""

from __future__ import annotations

import json
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
    """Show runs in the browser: curves, steps, episodes as trees, every token with its numbers."""
    from graft.config import ConfigError
    from graft.tools.search.server import listening
    from graft.viewer.runs import open_runs
    from graft.viewer.server import new_token, serve

    if not _is_loopback(host):
        raise ConfigError(
            f"--host {host}: runs are shown on this machine only. From another one, forward the port: "
            "ssh -L 8000:127.0.0.1:8000 THIS_MACHINE, and here graft view RUN --port 8000"
        )
    opened = open_runs(runs)
    token = new_token()
    with listening(host, port) as listener:
        address = listener.getsockname()
        named = f"[{address[0]}]" if ":" in address[0] else address[0]
        url = f"http://{named}:{address[1]}/?token={token}"

        def ready() -> None:
            if as_json:
                answer = {"url": url, "port": address[1], "runs": [str(run.path) for run in opened]}
                typer.echo(json.dumps(answer))
            else:
                names = ", ".join(run.name for run in opened)
                typer.echo(f"showing {names}\n  {url}\nend with Ctrl-C")
            if not no_browser:
                _open_browser(url)

        serve(opened, listener, token, ready)


def _is_loopback(host: str) -> bool:
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _open_browser(url: str) -> None:
    """In a thread: some browsers block the process that starts them."""
    import threading
    import webbrowser

    threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
