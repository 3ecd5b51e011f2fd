"""JSON to an HTTP server and back, again and again until it answers or time is up.

    429, 408, 5xx     wait (as long as Retry-After says, else 0.5, 1, 2, ... s), ask again
    garbage, nothing  the same: no JSON, half a reply, a closed connection, silence
    other 4xx         so it will stay: raised at once, with what the server said

A 429 means "later" and is asked again until the deadline; anything else that often.

Plain asyncio streams: a thousand requests wait without a thread, and giving one up closes its
connection, so the server hears of it too. Proxies and redirects are not followed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import ssl
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

from graft.engine.errors import EngineError
from graft.rewards.judge.rate_limit import read_retry_after

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
RETRIES = 6
"""Unless the caller wants another number."""
MAX_HEAD = 2**16
MAX_BODY = 2**26
SHOWN = 300
"""Characters of a server's words in a message."""


class EndpointError(EngineError):
    """The server gave no usable answer; `code` is its HTTP status, 0 where there was none."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class _Passing(Exception):
    """A fault that the next attempt may not meet."""

    def __init__(self, text: str, code: int = 0, pause: float | None = None) -> None:
        super().__init__(text)
        self.code, self.pause = code, pause


class Endpoint:
    """A server by its base address, such as http://host:8000/v1.

    timeout   seconds for one attempt
    deadline  seconds for an answer, all attempts and pauses together
    """

    def __init__(self, url: str, *, key: str = "", timeout: float, deadline: float) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EngineError(
                f"endpoint {url!r} is no address of a server; one looks like http://host:8000/v1"
            )
        self.url = url.rstrip("/")
        for ending in ("/chat/completions", "/completions"):
            self.url = self.url.removesuffix(ending)
        self._path = urllib.parse.urlsplit(self.url).path
        self._host, self._is_safe = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._is_safe else 80)
        self._name = parts.netloc.rpartition("@")[2]
        self._key, self.timeout, self.deadline = key, timeout, deadline
        self._has_told = False

    async def ask(
        self,
        path: str,
        content: Mapping[str, Any] | None,
        read: Callable[[Any], Any],
        deadline: float = math.inf,
        retries: int | None = None,
    ) -> Any:
        """POST `content` (None: GET); what `read` makes of the JSON. Its ValueError is garbage too.

        An answer without a body is None. `retries` after the first attempt, of faults other than 429.
        """
        retries = RETRIES if retries is None else retries
        deadline = min(deadline, self.deadline)
        end = time.monotonic() + deadline
        attempt = 0
        while True:
            try:
                return read(await self._attempt(path, content, end))
            except (_Passing, ValueError) as error:
                fault = error if isinstance(error, _Passing) else _Passing(f"sent {error}")
            pause = min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE) * random.uniform(0.75, 1.25)
            pause = max(pause, fault.pause or 0.0)
            attempt += 1
            is_last = attempt > retries and fault.code != 429
            if is_last or time.monotonic() + pause >= end:
                times = "once" if attempt == 1 else f"{attempt} times"
                raise EndpointError(
                    f"endpoint {self.url} {fault} (asked {times} in up to {deadline:g} s)",
                    fault.code,
                )
            if not self._has_told:
                self._has_told = True
                logging.getLogger("graft").warning(
                    "endpoint %s %s; it is asked again, for up to %g s", self.url, fault, deadline
                )
            await asyncio.sleep(pause)

    async def _attempt(self, path: str, content: Mapping[str, Any] | None, end: float) -> Any:
        left = min(self.timeout, end - time.monotonic())
        try:
            async with asyncio.timeout(left):
                code, head, body = await self._exchange(path, content)
        except TimeoutError:
            raise _Passing(f"gave no answer in {left:.3g} s") from None
        except asyncio.IncompleteReadError:
            raise _Passing("closed the connection before its answer was complete") from None
        except (OSError, asyncio.LimitOverrunError) as error:
            raise _Passing(f"cannot be reached: {error or type(error).__name__}") from None
        said = body[:SHOWN].decode("utf-8", "replace").strip()
        if code in (408, 429) or code >= 500:
            raise _Passing(
                f"answered {code}: {said}", code, read_retry_after(head.get("retry-after"))
            )
        if not 200 <= code < 300:
            where = f" (it points to {head['location']})" if "location" in head else ""
            key = ". The key is read from $OPENAI_API_KEY" if code in (401, 403) else ""
            raise EndpointError(f"endpoint {self.url} answered {code}{where}: {said}{key}", code)
        if not body:
            return None
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise _Passing(f"sent what is no JSON: {said!r}") from None

    async def _exchange(
        self, path: str, content: Mapping[str, Any] | None
    ) -> tuple[int, dict[str, str], bytes]:
        """One request on a connection of its own: status, head, body."""
        secure = ssl.create_default_context() if self._is_safe else None
        reader, writer = await asyncio.open_connection(
            self._host, self._port, ssl=secure, limit=MAX_HEAD
        )
        try:
            body = b"" if content is None else json.dumps(content).encode()
            writer.write(self._head("GET" if content is None else "POST", path, len(body)) + body)
            await writer.drain()
            return await _read_reply(reader)
        finally:
            writer.close()

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [
            f"{method} {self._path}{path} HTTP/1.1",
            f"Host: {self._name}",
            "Connection: close",
            "Accept: application/json",
            "Content-Type: application/json",
            f"Content-Length: {length}",
        ]
        if self._key:
            lines.append(f"Authorization: Bearer {self._key}")
        return "\r\n".join([*lines, "", ""]).encode()


async def _read_reply(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    try:
        code = int(first.split()[1])
    except (IndexError, ValueError):
        raise ValueError(f"no HTTP: {first[:80]!r}") from None
    named = (line.partition(":") for line in lines if line)
    head = {name.strip().lower(): value.strip() for name, _, value in named}
    if "chunked" in head.get("transfer-encoding", "").lower():
        return code, head, await _read_chunks(reader)
    if head.get("content-length", "").isdigit():
        length = int(head["content-length"])
        if length > MAX_BODY:
            raise ValueError(f"{length} bytes; an answer has at most {MAX_BODY}")
        return code, head, await reader.readexactly(length)
    body = bytearray()
    while part := await reader.read(MAX_HEAD):
        _add(body, part)
    return code, head, bytes(body)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        if size > MAX_BODY:
            raise ValueError(f"a piece of {size} bytes; an answer has at most {MAX_BODY}")
        _add(body, (await reader.readexactly(size + 2))[:-2])
    return bytes(body)


def _add(body: bytearray, part: bytes) -> None:
    body += part
    if len(body) > MAX_BODY:
        raise ValueError(f"more than {MAX_BODY} bytes")
