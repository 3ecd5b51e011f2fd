"""Helpers for several tests of the search tool."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from graft_search import Hit


def write_corpus(path: Path, contents: Sequence[str]) -> str:
    rows = [json.dumps({"id": f"d{n}", "contents": text}) for n, text in enumerate(contents)]
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return str(path)


class Echo:
    """A source that answers with the query itself, `topk` times, and records its calls."""

    fingerprint = "echo"

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], int]] = []

    def open(self) -> None: ...

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        self.calls.append((list(queries), topk))
        return [[Hit(f"{n}", f"T{n}", query, 9.0 - n) for n in range(topk)] for query in queries]


@contextmanager
def serving(app) -> Iterator[str]:
    """`app` on a free port of this machine; its address."""
    uvicorn = pytest.importorskip("uvicorn")
    config = uvicorn.Config(app, port=0, log_level="error", ws="none", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive() and time.monotonic() < end, "the server did not start"
        time.sleep(0.01)
    try:
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(30)
