"""Access control of everything that listens: who is answered, and how much one may send.

Any page in a browser can send requests to 127.0.0.1, a foreign domain name can be made to point there,
and other users of the machine can connect. So each request is checked before anything is looked up:

    method                        GET alone, or what the service needs
    Host is this address          a foreign name that points here (DNS rebinding) is refused
    no other origin               neither by Origin nor by Sec-Fetch-Site
    the token                     in the address (?token=), as a bearer's, or in a cookie that no script reads
    the body                      at most `max_body` bytes, in at most BODY_SECONDS

`graft.serving.listening` limits connections and times. A service stores its token in a file that only
this user can read, under its port: other programs of graft find it there (`local_token`).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from graft.files import user_folder
from graft.http import is_loopback

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Any, Send], Awaitable[None]]
Refused = tuple[int, str]
"""Status and text of an answer."""

BODY_SECONDS = 30.0
MAX_DRAINED = 8
"""Bodies of the greatest length that are read and thrown away of one that is too long."""
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}

API_HEADERS = {name: HEADERS[name] for name in ("x-content-type-options", "cache-control")}
"""Of answers to programs: each header takes time in every request."""


class Rules:
    """What a request must have to be answered.

    address   the bound address, from `socket.getsockname()`
    where     where a caller finds the token, for the text of a refusal
    """

    def __init__(
        self, token: str, address: Sequence[Any], where: str, methods: Sequence[str] = ("GET",)
    ) -> None:
        self.token, self.where, self.methods = token, where, tuple(methods)
        host, self.port = str(address[0]), int(address[1])
        names = {"127.0.0.1", "localhost", "::1", host}
        if not is_loopback(host):
            names |= {socket.gethostname(), socket.getfqdn()}
        self.hosts = {self._named(name) for name in names}
        # cookies do not know ports: two viewers at once must not overwrite each other's
        self.cookie = f"graft_{self.port}"

    def refusal(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        tokens: Sequence[str],
        connected_to: str = "",
    ) -> Refused | None:
        """Why a request is not answered; None: it is. Names of `headers` are lower case."""
        if method not in self.methods:
            return 405, f"{method} is not answered here, only {', '.join(self.methods)}"
        hosts = {*self.hosts, self._named(connected_to)}
        if headers.get("host", "").lower() not in hosts:
            return 403, "the Host of the request is not the address of this server"
        if "%" in path:
            path = unquote(unquote(path))  # %252e is a dot to a server that decodes twice
        if ".." in path or "\\" in path or "//" in path or "\0" in path:
            return 404, "no such page"
        origin = headers.get("origin")
        if origin is not None and origin.removeprefix("http://") not in hosts:
            return 403, "requested by a page of another origin"
        is_opening = path == "/" and headers.get("sec-fetch-mode") == "navigate"
        is_foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        if is_foreign and not is_opening:  # a link to the page may be followed, with its token
            return 403, "requested by a page of another origin"
        return self.stranger(path, headers, tokens)

    def stranger(
        self, path: str, headers: Mapping[str, str], tokens: Sequence[str]
    ) -> Refused | None:
        """Why the caller may not ask for this path; None: they may."""
        if any(map(self.is_token, [*tokens, *self._offered_tokens(headers)])):
            return None
        return 401, f"no token, or a wrong one: {self.where}"

    def written(self, refused: Refused, path: str, headers: Mapping[str, str]) -> tuple[str, bytes]:
        """The content type and the body of a refusal."""
        return "text/plain; charset=utf-8", f"{refused[1]}\n".encode()

    def _named(self, host: str) -> str:
        return f"[{host}]:{self.port}" if ":" in host else f"{host.lower()}:{self.port}"

    def _offered_tokens(self, headers: Mapping[str, str]) -> list[str]:
        pairs = [part.strip().partition("=") for part in headers.get("cookie", "").split(";")]
        cookies = [value for name, _, value in pairs if name == self.cookie]
        return [*cookies, *bearer_tokens(headers)]

    def is_token(self, shown: str) -> bool:
        return equal_secrets(shown, self.token)


def bearer_tokens(headers: Mapping[str, str]) -> list[str]:
    """What `Authorization: Bearer ...` shows: one text, or none."""
    kind, _, value = headers.get("authorization", "").partition(" ")
    return [value.strip()] if kind.lower() == "bearer" else []


def equal_secrets(shown: str, secret: str) -> bool:
    """Compared in a time that says nothing about the secret."""
    return secrets.compare_digest(shown.encode(), secret.encode())


class Guard:
    """An ASGI application around another; refusals are short, in the form that the rules give them.

    The application finds the headers, texts by lower-case names, as `named_headers` of the scope.

    max_body   bytes of a request's body, which the application gets as a whole; 0: it gets none
    headers    of every answer; a service that no browser shows needs fewer
    """

    def __init__(
        self, app: App, rules: Rules, max_body: int = 0, headers: Mapping[str, str] = HEADERS
    ) -> None:
        self.app, self.rules, self.max_body = app, rules, max_body
        self._pairs = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None
        headers = scope["named_headers"] = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        asked = scope["query_string"]
        tokens = parse_qs(asked.decode("latin-1")).get("token", []) if asked else []
        path = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
        connected_to = str((scope.get("server") or ("",))[0])
        refused = self.rules.refusal(scope["method"], path, headers, tokens, connected_to)
        body: bytes | Refused = b""
        if refused is None and self.max_body:
            connection = scope.get("state", {}).get("connection")
            is_here = connection is not None and connection.has_body
            body = await self._body(headers, receive, None if is_here else BODY_SECONDS)
            refused = None if isinstance(body, bytes) else body
        if refused is not None:
            written = self.rules.written(refused, path, headers)
            return await self._answer(send, receive, refused[0], *written)
        more = self._pairs
        if tokens:
            cookie = f"{self.rules.cookie}={self.rules.token}; Path=/; HttpOnly; SameSite=Strict"
            more = [*more, (b"set-cookie", cookie.encode())]
        own = {name for name, _ in more}

        async def send_guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                kept = [pair for pair in message["headers"] if pair[0].lower() not in own]
                message = {**message, "headers": [*kept, *more]}
            await send(message)

        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_guarded() -> Any:
            return messages.pop() if messages else await receive()

        await self.app(scope, receive_guarded, send_guarded)

    async def _body(
        self, headers: Mapping[str, str], receive: Any, seconds: float | None
    ) -> bytes | Refused:
        too_long = 413, f"the body has more than {self.max_body} bytes"
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.max_body:
            return too_long
        body = bytearray()
        try:
            async with nullcontext() if seconds is None else asyncio.timeout(seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return 400, "the body is incomplete"
                    body += message.get("body", b"")
                    if len(body) > self.max_body:
                        return too_long
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            return 408, f"the body did not arrive in {BODY_SECONDS:g} s"

    async def _answer(self, send: Send, receive: Any, status: int, kind: str, body: bytes) -> None:
        # what is left of a body must not be read as the next request
        headers = {"content-type": kind, "connection": "close", **HEADERS}
        if status == 405:
            headers["allow"] = ", ".join(self.rules.methods)
        if status == 413:
            headers["content-length"] = str(len(body))
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": body, "more_body": status == 413})
        if status == 413:  # a client that still sends would see a reset, and not the answer
            await self._drain(receive)
            await send({"type": "http.response.body", "body": b""})

    async def _drain(self, receive: Any) -> None:
        """Read what is left of a body that is too long, as far as MAX_DRAINED goes."""
        arrived = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(BODY_SECONDS):
                while arrived < MAX_DRAINED * self.max_body:
                    message = await receive()
                    arrived += len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body"):
                        return


def new_token() -> str:
    return secrets.token_urlsafe(24)


def _token_file(port: int) -> Path:
    return user_folder("XDG_CONFIG_HOME", "~/.config") / "graft" / "served" / f"{port}.token"


@contextmanager
def stored_token(token: str, port: int) -> Iterator[None]:
    """Let other programs of this user find the token of the service at this port, while it runs."""
    with suppress(
        OSError
    ):  # no home, or one that cannot be written to: the printed address has the token
        file = _token_file(port)
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.unlink(missing_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as opened:
            opened.write(token)
    try:
        yield
    finally:
        with suppress(OSError):
            _token_file(port).unlink(missing_ok=True)


def local_token(url: str) -> str:
    """The token of a service of graft that this user runs on this machine; "" if there is none."""
    parts = urlsplit(url)
    if not is_loopback(parts.hostname) or parts.port is None:
        return ""
    try:
        return _token_file(parts.port).read_text().strip()
    except (OSError, ValueError):
        return ""
