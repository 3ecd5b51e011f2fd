"""Search through a retrieval service over HTTP; `wire` has the messages."""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence

from graft.http import HttpClient, HttpFault
from graft.tools.errors import ToolError
from graft.tools.search.source import Hit
from graft.tools.search.wire import TYPES, load_msgpack, read_reply, write_request

MAX_REPLY = 64 * 2**20  # bytes
FIRST_PAUSE = 0.1  # seconds before the second attempt, doubled from then on


class HttpSource:
    """A service at `url`, Search-R1's (`wire="json"`) or GEM's (`wire="msgpack"`).

    "http://host:8000" means http://host:8000/retrieve. `timeout` is for a request with all its attempts:
    a refused connection and the answers 429 and 5xx are retried after 0.1, 0.2, ... seconds while time
    is left. Other answers are final.
    """

    def __init__(
        self, url: str, *, wire: str = "json", timeout: float = 5.0, retries: int = 2
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"search url {url!r} is not of the form http://host:port/retrieve")
        if wire not in TYPES:
            raise ValueError(f"wire={wire!r}; known: {', '.join(TYPES)} (Search-R1's, GEM's)")
        if wire == "msgpack":
            load_msgpack()  # fails now if it is not installed, not in a rollout
        if timeout <= 0 or retries < 0:
            raise ValueError(f"timeout={timeout} must be above 0, retries={retries} at least 0")
        self.url = parts._replace(path="/retrieve").geturl() if parts.path in "/" else url
        self.wire = wire
        self.fingerprint = f"http:{self.url}"
        self._client = HttpClient(
            timeout=timeout,
            deadline=timeout,
            retries=retries,
            headers={"Content-Type": TYPES[wire]},
            first_pause=FIRST_PAUSE,
            max_bytes=MAX_REPLY,
        )

    def open(self) -> None:
        """Nothing to prepare: the service may still be starting."""

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        if self.wire == "json":
            return self._request(queries, topk) if queries else []
        # a message of this wire has one query
        return [self._request([query], topk)[0] for query in queries]

    def _request(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        try:
            data = self._client.request(self.url, write_request(queries, topk, self.wire), bytes)
        except HttpFault as fault:
            raise ToolError(f"{self.url} {fault}") from fault
        try:
            found = read_reply(data, len(queries), is_single=self.wire == "msgpack")
        except ValueError as error:  # BadMessage, or a row that is not a document
            raise ToolError(f"{self.url} sent no usable reply: {error}") from error
        return [hits[:topk] for hits in found]  # web services may ignore `topk`
