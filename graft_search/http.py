"""Search through a retrieval service over HTTP; `wire` has the messages."""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence

from graft.http import HttpClient, HttpFault
from graft.serving.guard import local_token
from graft.tools.errors import ToolError
from graft.trust.masking import mask, remember_all
from graft_search.source import Hit
from graft_search.wire import TYPES, load_msgpack, read_reply, write_request

MAX_REPLY = 64 * 2**20  # bytes
FIRST_PAUSE = 0.1  # seconds before the second attempt, doubled from then on
MALFORMED = (400, 415, 422)
"""Answers of a service to a message that it cannot read."""


class Malformed(ToolError):
    """The service could not read the message."""


def with_token(url: str) -> str:
    """The address with the token of a local service of graft, if it has none."""
    parts = urllib.parse.urlsplit(url)
    token = "" if "token=" in parts.query else local_token(url)
    query = "&".join(filter(None, [parts.query, f"token={token}"]))
    return parts._replace(query=query).geturl() if token else url


class HttpSource:
    """A service at `url`, Search-R1's (`wire="json"`) or GEM's (`wire="msgpack"`).

    `wire="auto"` sends JSON; if the service refuses its first request as malformed, msgpack is tried and
    kept where it is understood.

    "http://host:8000" means http://host:8000/retrieve. A service of `graft serve search` that this user
    runs on this machine needs no token in the address. `timeout` is for a request with all its attempts:
    a refused connection and the answers 429 and 5xx are retried after 0.1, 0.2, ... seconds while time
    is left. Other answers are final.
    """

    def __init__(
        self, url: str, *, wire: str = "auto", timeout: float = 5.0, retries: int = 2
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"search url {url!r} is not of the form http://host:port/retrieve")
        if wire not in ("auto", *TYPES):
            raise ValueError(f"wire={wire!r}; known: auto, {', '.join(TYPES)} (Search-R1's, GEM's)")
        if wire == "msgpack":
            load_msgpack()  # fails now if it is not installed, not in a rollout
        if timeout <= 0 or retries < 0:
            raise ValueError(f"timeout={timeout} must be above 0, retries={retries} at least 0")
        self.url = parts._replace(path="/retrieve").geturl() if parts.path in "/" else url
        remember_all(self.url)
        self.wire = wire
        self.fingerprint = f"http:{mask(self.url)}"
        self._clients = {
            name: HttpClient(
                timeout=timeout,
                deadline=timeout,
                retries=retries,
                headers={"Content-Type": content_type},
                first_pause=FIRST_PAUSE,
                max_bytes=MAX_REPLY,
            )
            for name, content_type in TYPES.items()
        }

    def open(self) -> None:
        """Nothing to prepare: the service may still be starting."""

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        if not queries:
            return []
        if self.wire != "auto":
            return self._ask(queries, topk, self.wire)
        try:
            found = self._ask(queries, topk, "json")
            self.wire = "json"
        except Malformed as refused:
            try:
                found = self._ask(queries, topk, "msgpack")
            except (ToolError, ImportError):
                raise refused from None
            self.wire = "msgpack"
        return found

    def _ask(self, queries: Sequence[str], topk: int, wire: str) -> list[list[Hit]]:
        if wire == "json":
            return self._request(queries, topk, wire)
        # a message of this wire has one query
        return [self._request([query], topk, wire)[0] for query in queries]

    def _request(self, queries: Sequence[str], topk: int, wire: str) -> list[list[Hit]]:
        content = write_request(queries, topk, wire)
        try:
            data = self._clients[wire].request(with_token(self.url), content, bytes)
        except HttpFault as fault:
            kind = Malformed if fault.code in MALFORMED else ToolError
            raise kind(f"{self.url} {fault}") from fault
        try:
            found = read_reply(data, len(queries), is_single=wire == "msgpack")
        except ValueError as error:  # BadMessage, or a row that is not a document
            raise ToolError(f"{self.url} sent no usable reply: {error}") from error
        return [hits[:topk] for hits in found]  # web services may ignore `topk`
