"""A retrieval service over any source: POST /retrieve in both forms of `wire`, GET /health.

Requests that arrive within a few milliseconds are sent to the source in one call, each with its own
topk, and with scores if it asks for them.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from graft.serving.guard import Guard, Rules, new_token, stored_token
from graft.serving.listening import NEEDS, address_of, listening, serve_app
from graft.tools.errors import ToolError
from graft_search.source import (
    MAX_TOPK,
    WEB_SOURCES,
    Hit,
    SearchSource,
    make_source,
)
from graft_search.wire import TYPES, BadMessage, read_request, write_reply

MAX_BODY = 8 * 2**20  # bytes
MAX_BATCH = 256  # queries in one call of the source


class QueuedQuery(NamedTuple):
    query: str
    topk: int
    answer: asyncio.Future[list[Hit]]


class QueryBatcher:
    """Collects queries for `wait` seconds and calls the source once; meanwhile it collects the next."""

    def __init__(self, source: SearchSource, wait: float) -> None:
        self.source, self.wait = source, wait
        self.queue: asyncio.Queue[QueuedQuery] = asyncio.Queue()

    async def search(self, query: str, topk: int) -> list[Hit]:
        if not query.strip():
            return []
        queued = QueuedQuery(query, topk, asyncio.get_running_loop().create_future())
        self.queue.put_nowait(queued)
        return await queued.answer

    async def run(self) -> None:
        while True:
            batch = [await self.queue.get()]
            if self.wait:
                await asyncio.sleep(self.wait)
            while len(batch) < MAX_BATCH and not self.queue.empty():
                batch.append(self.queue.get_nowait())
            by_topk: dict[int, list[QueuedQuery]] = defaultdict(list)
            for queued in batch:
                if not queued.answer.done():  # else its client is gone
                    by_topk[queued.topk].append(queued)
            # one call per topk: an approximate index may order the first three of ten differently
            for topk, group in by_topk.items():
                await self._answer(group, topk)

    async def _answer(self, group: list[QueuedQuery], topk: int) -> None:
        queries = [queued.query for queued in group]
        try:
            answers = await asyncio.to_thread(self.source.retrieve, queries, topk)
            for queued, hits in zip(group, answers, strict=True):
                if not queued.answer.done():
                    queued.answer.set_result(hits)
        except Exception as error:  # raised in the requests; the service continues
            for queued in group:
                if not queued.answer.done():
                    queued.answer.set_exception(error)


def build_app(source: SearchSource, topk: int = 3, *, wait: float = 0.01) -> Any:
    """The service as an ASGI application; it opens the source when it starts.

    `topk` is the default for requests; `wait` is the time in seconds to collect a batch.
    """
    try:
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import JSONResponse, PlainTextResponse, Response
        from starlette.routing import Route
    except ImportError as error:
        raise ImportError(NEEDS) from error
    if not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"topk={topk} is not between 1 and {MAX_TOPK}")
    batcher: QueryBatcher

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        nonlocal batcher
        await asyncio.to_thread(source.open)
        batcher = QueryBatcher(source, wait)
        task = asyncio.create_task(batcher.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def retrieve(request: Request) -> Response:
        try:
            parsed = read_request(await request.body())
        except (BadMessage, ImportError) as error:  # ImportError: the msgpack package is missing
            return PlainTextResponse(str(error), 400)
        try:
            answers = await asyncio.gather(
                *(batcher.search(query, parsed.topk or topk) for query in parsed.queries)
            )
        except ToolError as error:
            return PlainTextResponse(f"the source failed: {error}", 502)
        return Response(write_reply(parsed, answers), media_type=TYPES[parsed.wire])

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok", "source": source.fingerprint, "topk": topk})

    routes = [
        Route("/retrieve", retrieve, methods=["POST"]),
        Route("/health", health, methods=["GET"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def served_source(corpus: str, source: str = "", **dense: str | None) -> SearchSource:
    """The source that `graft serve search` describes; options of vectors make it a dense one."""
    options = {name: value for name, value in dense.items() if value not in ("", None)}
    if source in WEB_SOURCES and not corpus and not options:
        return make_source(source)
    if not corpus and source not in WEB_SOURCES:
        raise ValueError(
            'nothing to search in: give a corpus file (or "small"), or a web source: --source '
            f"{', '.join(WEB_SOURCES)}"
        )
    if source in WEB_SOURCES:
        raise ValueError(f"--source {source} searches the web: it has no corpus, model or index")
    if options and not options.get("model"):
        raise ValueError(
            "--index and --query-prefix are for vectors: give --model too, the embedding model that "
            "the index was made with (intfloat/e5-base-v2 for wiki-18's)"
        )
    return make_source(source or ("dense" if options else "bm25"), corpus=corpus, **options)


def serve_search(
    corpus: str, source: str, dense: Mapping[str, str | None], host: str, port: int, topk: int
) -> None:
    """`graft serve search`: serve a corpus or a web source until interrupted."""
    serve(served_source(corpus, source, **dense), host=host, port=port, topk=topk)


TOKEN = "GRAFT_SEARCH_TOKEN"
"""Environment variable with the token of the service; without it a new one is made at each start."""


def serve(source: SearchSource, host: str = "127.0.0.1", port: int = 8000, topk: int = 3) -> None:
    """Serve until interrupted. Port 0 takes a free port; the address with its token is printed.

    A corpus that cannot be read and an address in use are errors at the start.
    """
    app = build_app(source, topk)
    token = os.environ.get(TOKEN, "").strip() or new_token()
    with listening(host, port) as listener:
        source.open()
        address = listener.getsockname()
        where = "the address that `graft serve search` printed has it, as ?token="
        guarded = Guard(app, Rules(token, address, where, ("GET", "POST")), MAX_BODY)

        def ready() -> None:  # the printed address is usable at once
            print(
                f"answering {address_of(listener)}/retrieve?token={token}, end with Ctrl-C",
                flush=True,
            )

        with stored_token(token, address[1]):
            serve_app(guarded, listener, ready)
