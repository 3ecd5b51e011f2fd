"""The servers of an `OpenAIEngine`: several copies of one model, shared fairly; one may be down.

contexts   a b c d   ->   server 1: a c    server 2: b d      forks stay with their prefix cache
server 2 fails       ->   server 1: a c b d                   and after a minute 2 is tried again
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from graft.engine.errors import EngineError
from graft.engine.remote.endpoint import Endpoint, EndpointError, parsing

PAUSE = 60.0
"""Seconds without requests after a server failed, while others work."""
LIST_SECONDS = 20.0
"""For the list of models, which some servers do not have."""
NOT_OF_THE_REQUEST = (0, 401, 403, 404, 429)
"""Statuses, besides 5xx, that another server may not answer with."""

KEEP_STOPS: dict[str, dict[str, Any]] = {
    "vllm": {"include_stop_str_in_output": True},
    "sglang": {"no_stop_trim": True},
}
"""Server -> the parameter that keeps stop strings in the text. Other servers refuse or ignore it."""


class OpenAIServer(Endpoint):
    """One server, and what is known of it."""

    def __init__(self, url: str, deadline: float, api_key_env: str = "") -> None:
        super().__init__(url, timeout=deadline / 2, deadline=deadline, api_key_env=api_key_env)
        self.where = f"endpoint {self.url}"
        self.model = ""
        self.keep_stops: dict[str, Any] | None = None
        """None: not inspected yet."""
        self.limit = "max_tokens"
        """Its name of the limit of new tokens."""
        self.num_contexts = 0
        self.num_opened = 0
        """Contexts so far."""
        self.down_until = 0.0

    @property
    def is_down(self) -> bool:
        return time.monotonic() < self.down_until

    async def inspect(self, model: str, is_only: bool = True) -> None:
        """Read once which models it serves. A server without a list is used as it is, also one that does
        not answer, if it is the only one."""
        retries = None if is_only else 1
        try:
            served = await self.ask(
                "/models", None, _models, deadline=LIST_SECONDS, retries=retries
            )
        except EndpointError as error:
            is_down = error.code == 0 or error.code >= 500
            if error.code in (401, 403) or (is_down and not (is_only and model)):
                raise  # without a name its list is needed
            served = []
        names = [name for name, _ in served]
        if not model and len(names) != 1:
            known = (
                f"it serves {', '.join(names[:8])}" if names else "it does not list what it serves"
            )
            raise EngineError(f"{self.where} needs the name of a model (--model); {known}")
        if model and names and model not in names:
            raise EngineError(
                f"{self.where} does not serve {model!r}, but "
                f"{', '.join(names[:8])}; give one of them (--model)"
            )
        self.model = model or names[0]
        owner = next((owner for name, owner in served if name == self.model), "")
        self.keep_stops = KEEP_STOPS.get(owner, {})


class OpenAIServers:
    """The servers of an engine, by their addresses."""

    def __init__(self, urls: Sequence[str], deadline: float, api_key_env: str = "") -> None:
        self.each = [OpenAIServer(url, deadline, api_key_env) for url in urls]
        if not self.each:
            raise EngineError("no endpoint: give the address of a server, http://host:8000/v1")
        addresses = [server.url for server in self.each]
        if len(set(addresses)) < len(addresses):
            twice = next(url for url in addresses if addresses.count(url) > 1)
            raise EngineError(f"endpoint {twice} is named twice; name every server once")
        self.where = ", ".join(server.where for server in self.each)

    async def inspect(self, model: str) -> None:
        """Inspect all servers; refused if they serve different models, or if none can be used."""
        faults: list[EndpointError] = []
        for server in self.each:
            try:
                await server.inspect(model, is_only=len(self.each) == 1)
            except EndpointError as error:
                faults.append(error)
                self.exclude(server, error, tried=len(faults))
        models = {server.model for server in self.each if server.keep_stops is not None}
        if len(models) > 1:
            raise EngineError(
                f"the endpoints serve different models ({', '.join(sorted(models))}); name the one that "
                "all of them have (--model)"
            )

    def pick(self) -> OpenAIServer:
        """The server with the fewest contexts, now and so far; of servers that all failed, the first."""
        working = [server for server in self.each if not server.is_down]
        if working:
            return min(working, key=lambda server: (server.num_contexts, server.num_opened))
        return min(self.each, key=lambda server: server.down_until)

    def exclude(self, server: OpenAIServer, error: EndpointError, tried: int) -> None:
        """Send no requests to a server for a while; raises the error if it concerns the request, or if
        every server was tried."""
        if error.code not in NOT_OF_THE_REQUEST and error.code < 500:
            raise error
        if not server.is_down and len(self.each) > 1:
            logging.getLogger("graft").warning(
                "%s; it gets no requests for %g s, the other endpoints take them", error, PAUSE
            )
        server.down_until = time.monotonic() + PAUSE
        if tried >= len(self.each):
            raise error


def _models(answer: Any) -> list[tuple[str, str]]:
    with parsing(answer, "list of models"):
        return [(str(one["id"]), str(one.get("owned_by", ""))) for one in answer["data"]]
