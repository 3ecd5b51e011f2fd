"""JSON requests to a server; `graft.http` defines when a request is repeated.

After a 429 a request is repeated until the deadline, after other faults `RETRIES` times. Proxies and
redirects are not followed.
"""

from __future__ import annotations

import json
import logging
import math
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from graft.engine.errors import EngineError
from graft.http import HttpClient, HttpFault, json_of, key_for
from graft.trust.masking import remember_all

RETRIES = 6
"""The default of `Endpoint.ask`."""


class EndpointError(EngineError):
    """The server gave no usable answer; `code` is its HTTP status, 0 where there was none."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


@contextmanager
def parsing(answer: Any, wanted: str) -> Iterator[None]:
    """ValueError with the answer where it has another shape than the code inside expects."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError):
        raise ValueError(f"no {wanted}: {str(answer)[:200]!r}") from None


class Endpoint:
    """A server by its base address, such as http://host:8000/v1.

    timeout      seconds for one attempt
    deadline     seconds for an answer, all attempts and pauses together
    api_key_env  the environment variable with the key for this server; "": see `graft.http.key_for`
    """

    def __init__(self, url: str, *, timeout: float, deadline: float, api_key_env: str = "") -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EngineError(
                f"endpoint {url!r} is not the address of a server; use one such as http://host:8000/v1"
            )
        self.url = url.rstrip("/")
        for ending in ("/chat/completions", "/completions"):
            self.url = self.url.removesuffix(ending)
        remember_all(self.url)
        self.timeout, self.deadline = timeout, deadline
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        try:
            key = key_for(self.url, api_key_env)
        except ValueError as error:
            raise EngineError(f"engine.api_key_env={api_key_env}: {error}") from None
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self._client = HttpClient(
            timeout=timeout,
            deadline=deadline,
            retries=RETRIES,
            headers=headers,
            waits_out_429=True,
            is_direct=True,
        )
        self._has_warned = False

    async def ask(
        self,
        path: str,
        content: Mapping[str, Any] | None = None,
        read: Callable[[Any], Any] = lambda answer: answer,
        *,
        deadline: float = math.inf,
        retries: int | None = None,
    ) -> Any:
        """POST `content` (None: GET); what `read` makes of the JSON. Its ValueError is a fault too.

        An answer without a body is None. `retries` after the first attempt, of faults other than 429.
        """
        return await self.ask_at(self.url + path, content, read, deadline=deadline, retries=retries)

    async def ask_at(
        self,
        url: str,
        content: Mapping[str, Any] | None = None,
        read: Callable[[Any], Any] = lambda answer: answer,
        *,
        deadline: float = math.inf,
        retries: int | None = None,
    ) -> Any:
        """`ask` at another address of the same server."""
        seconds = min(deadline, self.deadline)

        def warn(fault: HttpFault, pause: float | None) -> None:
            if pause is not None and not self._has_warned:
                self._has_warned = True
                logging.getLogger("graft").warning(
                    "endpoint %s %s; the request is repeated for up to %g s",
                    self.url,
                    fault,
                    seconds,
                )

        try:
            return await self._client.request_async(
                url,
                None if content is None else json.dumps(content).encode(),
                lambda body: read(json_of(body)),
                deadline=deadline,
                retries=RETRIES if retries is None else retries,
                on_fault=warn,
            )
        except HttpFault as fault:
            text = f"endpoint {self.url} {fault}"
            if fault.code in (401, 403):
                text += (
                    ". The key for this server is named by engine.api_key_env, such as "
                    "engine.api_key_env=OPENAI_API_KEY"
                )
            if not fault.is_final:
                times = "once" if fault.attempts == 1 else f"{fault.attempts} times"
                text += f" (tried {times} in up to {seconds:g} s)"
            raise EndpointError(text, fault.code) from None
