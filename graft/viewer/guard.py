"""Access control: only the page that was opened with the address `graft view` printed gets answers.

Any page in the same browser can send requests to 127.0.0.1, and a foreign domain name can be made to
point there. So each request is checked for four things before anything is looked up:

    method GET                    no request changes anything
    Host is this address          a foreign name that points here (DNS rebinding) is refused
    no other origin               neither by Origin nor by Sec-Fetch-Site
    the token                     in the address, then in a cookie that scripts cannot read

Files are looked up in a table by their exact name: a path with `..` names none of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs, unquote

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Any, Send], Awaitable[None]]

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


class Guard:
    """An ASGI application around another; refusals are short plain text."""

    def __init__(self, app: App, token: str, port: int, host: str = "127.0.0.1") -> None:
        self.app, self.token = app, token
        self.hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]", host)}
        # cookies do not know ports: two viewers at once must not overwrite each other's
        self.cookie = f"graft_view_{port}"

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        tokens = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        refusal = self._refusal(scope, headers, tokens)
        if refusal is not None:
            await _answer(send, *refusal)
            return
        more = dict(HEADERS)
        if tokens:
            more["set-cookie"] = f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"

        async def send_guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                pairs = [(name.encode(), value.encode()) for name, value in more.items()]
                kept = [pair for pair in message["headers"] if pair[0].decode() not in more]
                message = {**message, "headers": [*kept, *pairs]}
            await send(message)

        await self.app(scope, receive, send_guarded)

    def _refusal(
        self, scope: Scope, headers: dict[str, str], tokens: list[str]
    ) -> tuple[int, str] | None:
        if scope["method"] != "GET":
            return 405, "only GET: this page shows runs and changes nothing"
        if headers.get("host", "") not in self.hosts:
            return 403, "this server answers only to 127.0.0.1 and localhost"
        path = unquote(scope.get("raw_path", scope["path"].encode()).decode("latin-1"))
        path = unquote(path)  # %252e is a dot to a server that decodes twice
        if ".." in path or "\\" in path or "//" in path or "\0" in path:
            return 404, "no such page"
        origin = headers.get("origin")
        if origin is not None and origin.removeprefix("http://") not in self.hosts:
            return 403, "requested by a page of another origin"
        is_opening = scope["path"] == "/" and headers.get("sec-fetch-mode") == "navigate"
        is_foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        if is_foreign and not is_opening:  # a link to the page may be followed, with its token
            return 403, "requested by a page of another origin"
        if not any(map(self._is_token, [*tokens, *self._shown(headers)])):
            return 401, "open the address that `graft view` printed: it holds the token"
        return None

    def _shown(self, headers: dict[str, str]) -> list[str]:
        pairs = [part.strip().partition("=") for part in headers.get("cookie", "").split(";")]
        shown = [value for name, _, value in pairs if name == self.cookie]
        kind, _, value = headers.get("authorization", "").partition(" ")
        return [*shown, value] if kind.lower() == "bearer" else shown

    def _is_token(self, shown: str) -> bool:
        return secrets.compare_digest(shown.encode(), self.token.encode())


async def _answer(send: Send, status: int, text: str) -> None:
    headers = {"content-type": "text/plain; charset=utf-8", **HEADERS}
    if status == 405:
        headers["allow"] = "GET"
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": f"{text}\n".encode()})
