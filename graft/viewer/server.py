"""The server behind `graft view`: a few static files, and the JSON of `graft.viewer.answers`.

Handlers are plain functions: Starlette runs them in threads, so a long search delays no other request.
"""

from __future__ import annotations

import importlib.resources
import json
import socket
from collections.abc import Callable, Sequence
from typing import Any

from graft.serving.guard import App, Guard, Rules
from graft.serving.listening import serve_app
from graft.trust.masking import mask, mask_shapes
from graft.viewer.answers import Answers, BadRequest, Query
from graft.viewer.runs import NotThere, ViewedRun

TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}


def build_app(runs: Sequence[ViewedRun], token: str, address: Sequence[Any]) -> App:
    """The page and its answers as one ASGI application, guarded; `address` is the bound one."""
    try:
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse, Response
        from starlette.routing import Route
    except ImportError as error:
        raise ImportError(_MISSING) from error
    answers = Answers(runs)
    files = static_files()

    def answering(answer: Callable[[Query], Any]) -> Callable[[Request], Response]:
        def respond(request: Request) -> Response:
            try:
                found = answer(request.query_params)
            except NotThere as error:
                return PlainTextResponse(f"{error}\n", 404)
            except BadRequest as error:
                return PlainTextResponse(f"{error}\n", 400)
            except (OSError, KeyError, TypeError, ValueError) as error:
                # the folder has another layout than graft writes: the page shows the error and stays usable
                why = f"this part of the run cannot be read: {type(error).__name__}: {error}"
                return PlainTextResponse(f"{mask(why)[:500]}\n", 500)
            if isinstance(found, str):
                return Response(
                    found,
                    media_type="text/csv",
                    headers={"content-disposition": 'attachment; filename="curves.csv"'},
                )
            body = mask_shapes(json.dumps(found, allow_nan=False, separators=(",", ":")))
            return Response(body, media_type="application/json")

        return respond

    def static(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            return PlainTextResponse("no such page\n", 404)
        return Response(files[name], media_type=TYPES[name.rpartition(".")[2]])

    handlers = {
        "runs": answers.about,
        "summary": answers.summary,
        "pulse": answers.pulse,
        "curves": answers.curves,
        "band": answers.band,
        "csv": answers.sheet,
        "tasks": answers.tasks,
        "episode": answers.episode,
        "tokens": answers.tokens,
        "text": answers.text,
        "search": answers.search,
        "occurrences": answers.occurrences,
        "explain": answers.explain,
        "settings": answers.settings,
    }
    routes = [Route(f"/api/{name}", answering(answer)) for name, answer in handlers.items()]
    routes += [Route("/", static), Route("/static/{name}", static)]
    where = "open the address that `graft view` printed, which has it"
    return Guard(Starlette(routes=routes), Rules(token, address, where))


def serve(
    runs: Sequence[ViewedRun], listener: socket.socket, token: str, ready: Callable[[], None]
) -> None:
    """Serve on a bound socket until interrupted; `ready` is called when it listens."""
    serve_app(build_app(runs, token, listener.getsockname()), listener, ready)


def static_files() -> dict[str, bytes]:
    """Name -> content; no other file can be requested."""
    folder = importlib.resources.files("graft.viewer") / "static"
    return {
        entry.name: entry.read_bytes()
        for entry in folder.iterdir()
        if entry.name.rpartition(".")[2] in TYPES
    }


_MISSING = 'graft view needs starlette and uvicorn: pip install "graft-rl[view]"'
