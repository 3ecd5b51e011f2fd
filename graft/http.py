"""HTTP to a server, repeated until it answers or time is up; from threads and from asyncio.

    408, 429, 5xx       wait (0.5, 1, 2, ... s, or as long as Retry-After says), then repeat
    garbage, nothing    the same: half a reply, a closed connection, silence, what `read` refuses
    other 4xx, 3xx      final: raised at once, with the text that the server sent
    another origin      final: a redirect is followed on the same server, or from http to https there

    client = HttpClient(timeout=30.0, deadline=120.0, retries=3)
    client.request("http://host:8001/v1/models", None, json_of)               in a thread
    await client.request_async("http://host:8001/v1/models", None, json_of)   on an event loop

Every attempt has a connection of its own: cancelling a request closes it, so the server stops too.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import json
import math
import os
import random
import ssl
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import SplitResult, urljoin, urlsplit

from graft.trust import check_address, check_program
from graft.trust.masking import mask, remember

T = TypeVar("T")

FIRST_PAUSE = 0.5
"""Seconds before the second attempt; doubled from then on."""
LONGEST_PAUSE = 30.0
JITTER = 0.25
"""Pauses are drawn between 0.75 and 1.25 times their length: clients that failed together do not
return together."""
SHOWN = 300
"""Characters of a server's text in a message."""
TOO_MANY_REQUESTS = 429


class HttpFault(Exception):
    """An attempt without a usable answer. The text continues a sentence about the server:
    "answered 500: out of memory", "gave no answer in 5 s", "cannot be reached: Connection refused".
    """

    def __init__(
        self, text: str, code: int = 0, *, retry_after: float = 0.0, is_final: bool = False
    ) -> None:
        super().__init__(mask(text))  # servers repeat what they were sent
        self.code = code
        """The HTTP status; 0 where there was none."""
        self.retry_after = retry_after
        """Seconds that the server asks to wait."""
        self.is_final = is_final
        """Another attempt would end the same way."""
        self.attempts = 1
        """Attempts that were made when this fault was raised."""


class HttpClient:
    """How requests are sent and repeated.

    timeout         seconds for one attempt
    deadline        seconds for an answer, all attempts and pauses together
    retries         attempts after the first
    first_pause     seconds before the second attempt; None: FIRST_PAUSE
    waits_out_429   a 429 is repeated until the deadline, however small `retries` is
    max_bytes       a longer answer is garbage
    is_direct       no proxies of the environment, and redirects are not followed
    """

    def __init__(
        self,
        *,
        timeout: float,
        deadline: float = math.inf,
        retries: int,
        headers: Mapping[str, str] | None = None,
        first_pause: float | None = None,
        waits_out_429: bool = False,
        max_bytes: int = 2**26,
        is_direct: bool = False,
    ) -> None:
        self.timeout, self.deadline, self.retries = timeout, deadline, retries
        self.headers = {"Connection": "close", "Accept-Encoding": "identity", **(headers or {})}
        self.first_pause, self.waits_out_429 = first_pause, waits_out_429
        self.max_bytes, self.is_direct = max_bytes, is_direct

    def request(
        self,
        url: str,
        content: bytes | None,
        read: Callable[[bytes], T],
        *,
        deadline: float = math.inf,
        before: Callable[[float], None] | None = None,
        on_fault: Callable[[HttpFault, float | None], None] | None = None,
    ) -> T:
        """POST `content` (None: GET) and return what `read` makes of the answer's body.

        A ValueError of `read` is a fault like others. HttpFault is raised when no attempt is left.

        before      called with the end of the deadline (time.monotonic) before each attempt
        on_fault    called after each fault that may pass, with the pause that follows; None: the last
        """
        check_address(url)
        attempts = _Attempts(self, deadline)
        while True:
            if before is not None:
                before(attempts.end)
            try:
                return read(self._exchange(url, content, attempts.seconds()))
            except (HttpFault, ValueError) as error:
                time.sleep(attempts.pause_after(error, on_fault))

    async def request_async(
        self,
        url: str,
        content: bytes | None,
        read: Callable[[bytes], T],
        *,
        deadline: float = math.inf,
        retries: int | None = None,
        on_fault: Callable[[HttpFault, float | None], None] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        """`request` on an event loop; `retries` in place of the client's own, `headers` besides them."""
        check_address(url)
        attempts = _Attempts(self, deadline, retries)
        while True:
            try:
                return read(
                    await self._exchange_async(url, content, attempts.seconds(), headers or {})
                )
            except (HttpFault, ValueError) as error:
                await asyncio.sleep(attempts.pause_after(error, on_fault))

    def _exchange(self, url: str, content: bytes | None, seconds: float) -> bytes:
        import httpx

        def check(reply: httpx.Response) -> None:
            if reply.has_redirect_location:
                refuse_other_origin(str(reply.url), reply.headers["location"])

        answer = _Answer(self.max_bytes)
        end = time.monotonic() + seconds
        try:
            with (
                httpx.Client(**self._settings(check), timeout=seconds) as client,
                client.stream("GET" if content is None else "POST", url, content=content) as reply,
            ):
                answer.begin(reply)
                # the library's timeout starts anew with every byte of a slow answer
                for piece in reply.iter_bytes():
                    answer.add(piece)
                    if time.monotonic() > end:
                        raise TimeoutError
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError) as error:
            answer.fail(error, seconds)
        return answer.body_or_fault()

    async def _exchange_async(
        self, url: str, content: bytes | None, seconds: float, headers: Mapping[str, str]
    ) -> bytes:
        import httpx

        async def check(reply: httpx.Response) -> None:
            if reply.has_redirect_location:
                refuse_other_origin(str(reply.url), reply.headers["location"])

        answer = _Answer(self.max_bytes)
        method = "GET" if content is None else "POST"
        try:
            async with (
                asyncio.timeout(seconds),
                httpx.AsyncClient(**self._settings(check), timeout=None) as client,
                client.stream(method, url, content=content, headers=dict(headers)) as reply,
            ):
                answer.begin(reply)
                async for piece in reply.aiter_bytes():
                    answer.add(piece)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError) as error:
            answer.fail(error, seconds)
        return answer.body_or_fault()

    def _settings(self, check: Callable[[Any], Any]) -> dict[str, Any]:
        return {
            "headers": self.headers,
            "verify": _certificates(),
            "trust_env": not self.is_direct,
            "follow_redirects": not self.is_direct,
            "event_hooks": {} if self.is_direct else {"response": [check]},
        }


class _Attempts:
    """The attempts at one request: how long each may take, and when the next one starts."""

    def __init__(self, client: HttpClient, deadline: float, retries: int | None = None) -> None:
        self.client, self.retries = client, client.retries if retries is None else retries
        self.end = time.monotonic() + min(deadline, client.deadline)
        self.count = 0

    def seconds(self) -> float:
        self.count += 1
        return max(min(self.client.timeout, self.end - time.monotonic()), 0.001)

    def pause_after(
        self, error: Exception, on_fault: Callable[[HttpFault, float | None], None] | None
    ) -> float:
        """Seconds until the next attempt; raises the fault if there is none."""
        fault = error if isinstance(error, HttpFault) else HttpFault(f"sent {error}")
        fault.attempts = self.count
        if fault.is_final:
            raise fault
        first = FIRST_PAUSE if self.client.first_pause is None else self.client.first_pause
        pause = min(first * 2 ** (self.count - 1), LONGEST_PAUSE)
        pause = max(pause * random.uniform(1 - JITTER, 1 + JITTER), fault.retry_after)
        is_waited_out = self.client.waits_out_429 and fault.code == TOO_MANY_REQUESTS
        is_last = self.count > self.retries and not is_waited_out
        is_last |= time.monotonic() + pause >= self.end
        if on_fault is not None:
            on_fault(fault, None if is_last else pause)
        if is_last:
            raise fault
        return pause


class _Answer:
    """One answer while it arrives."""

    def __init__(self, max_bytes: int) -> None:
        self.code, self.reason = 0, ""
        self.headers: Mapping[str, str] = {}
        self.body = bytearray()
        self.max_bytes = max_bytes

    def begin(self, reply: Any) -> None:
        self.code, self.reason, self.headers = reply.status_code, reply.reason_phrase, reply.headers

    def add(self, piece: bytes) -> None:
        self.body += piece
        if len(self.body) > self.max_bytes:
            raise ValueError(f"more than {self.max_bytes} bytes")

    def fail(self, error: Exception, seconds: float) -> None:
        """Raise the fault, unless the status is that of a fault: its text may be incomplete."""
        if self.code < 300:
            raise _fault_of(error, seconds) from None

    def body_or_fault(self) -> bytes:
        if 200 <= self.code < 300:
            return bytes(self.body)
        text = decode_excerpt(bytes(self.body)) or self.reason
        location = self.headers.get("location")
        where = f" (it points to {location})" if location else ""
        raise HttpFault(
            f"answered {self.code}{where}: {text}",
            self.code,
            retry_after=read_retry_after(self.headers.get("retry-after")),
            is_final=self.code not in (408, TOO_MANY_REQUESTS) and self.code < 500,
        )


def _fault_of(error: Exception, seconds: float) -> HttpFault:
    import httpx

    if isinstance(error, httpx.TimeoutException | TimeoutError):
        return HttpFault(f"gave no answer in {seconds:.3g} s")
    if isinstance(error, httpx.ReadError | httpx.WriteError) or "closed" in str(error):
        return HttpFault("closed the connection before its answer was complete")
    if isinstance(error, httpx.RemoteProtocolError):
        if "disconnected" in str(error):
            return HttpFault("closed the connection before its answer was complete")
        return HttpFault(f"sent no HTTP: {error}")
    is_final = isinstance(error, httpx.InvalidURL)
    return HttpFault(f"cannot be reached: {_system_error(error) or error}", is_final=is_final)


def _system_error(error: BaseException | None) -> OSError | None:
    """The error of the operating system below those of the libraries: "Connection refused"."""
    while error is not None and not (isinstance(error, OSError) and error.errno):
        if isinstance(error, BaseExceptionGroup):  # one for each address of the host
            error = error.exceptions[0]
        else:
            error = error.__cause__ or error.__context__
    return error


def refuse_other_origin(url: str, location: str) -> None:
    """HttpFault if an answer points to another server, which must not get this request and its keys.

    >>> refuse_other_origin("http://host/a", "https://host/b")
    """
    here, there = urlsplit(url), urlsplit(urljoin(url, location))
    is_secured = here.scheme == "http" and there.scheme == "https"
    is_same = here.scheme == there.scheme and _port(here) == _port(there)
    if here.hostname != there.hostname or not (is_same or is_secured):
        where = f"{there.scheme}://{there.hostname}:{_port(there)}"
        raise HttpFault(
            f"points to another server, {where}, which gets no request with our headers; give that "
            "address, if it is the right one",
            is_final=True,
        )


def _port(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)


def is_loopback(host: str | None) -> bool:
    """
    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("10.0.0.1")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"


OPENAI = ("OPENAI_API_KEY", "api.openai.com")
"""The variable that every client of OpenAI's reads, and the server that it is for."""


def key_for(url: str, variable: str = "", owner: str = "") -> str:
    """The key to send to the server at `url`; "" if none is meant for it.

    variable   the environment variable that the user names for this server; "": $OPENAI_API_KEY, which
               only OpenAI's own server gets
    owner      the server that the variable is for without being named for another

    ValueError: the variable is not set, or the key would travel unencrypted.
    """
    parts = urlsplit(url)
    if not variable:
        variable, owner = OPENAI
    if owner and (parts.hostname != owner or parts.scheme != "https"):
        return ""
    if not owner:  # in the run of a stranger: a key of ours, for a server of theirs
        check_program(f"the key of ${variable}, to be sent to {parts.hostname}", variable)
    key = os.environ.get(variable, "").strip()
    remember(key)
    if owner or (key and (parts.scheme == "https" or is_loopback(parts.hostname))):
        return key
    host = parts.hostname
    raise ValueError(
        f"the key of ${variable} is not sent to http://{host} in clear; use https, or forward a port of "
        f"this machine: ssh -L 8000:localhost:8000 {host}"
        if key
        else f"the environment variable {variable}, which holds the key for {host}, is not set"
    )


@functools.cache
def _certificates() -> ssl.SSLContext:
    """The system's; loading them takes longer than a request."""
    return ssl.create_default_context()


def decode_excerpt(body: bytes) -> str:
    """The start of a server's text, for a message."""
    return body[:SHOWN].decode("utf-8", "replace").strip()


def json_of(body: bytes) -> Any:
    """The JSON in a body; None in an empty one."""
    if not body:
        return None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError(f"what is no JSON: {decode_excerpt(body)!r}") from None


def read_retry_after(text: str | None) -> float:
    """Seconds that a Retry-After header asks to wait: a number, or a date. 0 where it has neither.

    >>> read_retry_after("2"), read_retry_after("soon"), read_retry_after(None)
    (2.0, 0.0, 0.0)
    """
    if not text:
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        try:
            date = parsedate_to_datetime(text)
        except ValueError:
            return 0.0
        known = date if date.tzinfo else date.replace(tzinfo=UTC)
        seconds = (known - datetime.now(UTC)).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0
