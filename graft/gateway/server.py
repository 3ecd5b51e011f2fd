"""The HTTP side of the gateway: three dialects of model providers, and sessions.

    POST /v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens; GET /v1/models
    POST /graft/sessions                  {"task": {...}, "metadata": {...}} -> id, key, base_url, task
    POST /graft/sessions/ID/reward        {"value": 1.0, "response_id": "..."}
    POST /graft/sessions/ID/end           {"status": "done", "reward": 1.0}
    GET  /graft/sessions/ID/episode

A session is named by the path (/s/ID/v1/...), by the header x-graft-session, or by its key alone, which
clients send as their API key. Opening one takes the token of the gateway; a session's key opens nothing
but that session.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from pydantic_core import from_json, to_json

from graft.gateway.dialects import anthropic, openai_chat, openai_responses
from graft.gateway.dialects.dialect import DIALECTS, Dialect, answer_id
from graft.gateway.dialects.fields import shown
from graft.gateway.dialects.response_store import ResponseStore
from graft.gateway.request import AgentRequest, PolicyAnswer, RefusedRequest
from graft.gateway.session import AgentSession
from graft.serving.guard import Refused, Rules, Scope, Send, bearer_tokens, equal_secrets
from graft.types import Status, Task
from graft.user_code import UserCodeError, as_number

MAX_BODY = 64 * 2**20
"""Bytes of a request: a context of a million tokens with some images' worth of text beside it."""
PING_SECONDS = 10.0
"""Between two pings of a stream while the policy samples."""
FIRST_SECONDS = 0.25
"""A stream begins this late, so that a request that is refused at once gets an HTTP status."""

STREAM = b"text/event-stream; charset=utf-8"

Find = Callable[[str], AgentSession | None]
"""The session with this key or id."""
Answers = list[PolicyAnswer]


class SessionSource(Protocol):
    """Opens the sessions that clients ask for over HTTP, and learns when they end."""

    async def open(self, task: Task | None, metadata: Mapping[str, Any]) -> AgentSession: ...
    async def end(self, session: AgentSession, status: Status) -> Status:
        """End a session; the status that it gets."""
        ...

    def release(self) -> None: ...


class Place(NamedTuple):
    """A path without the name of its session.

    "/s/abc/v1/messages" -> Place("abc", "/v1/messages");  "/graft/sessions/abc/end" -> Place("abc", "end")
    """

    session: str
    path: str
    is_control: bool = False

    @property
    def api_path(self) -> str:
        """With the /v1 that some clients leave out."""
        return self.path if self.path.startswith("/v1/") else f"/v1{self.path}"

    @classmethod
    def of(cls, path: str, headers: Mapping[str, str]) -> Place:
        parts = path.strip("/").split("/")
        if parts[:2] == ["graft", "sessions"] and len(parts) <= 4:
            return cls("".join(parts[2:3]), "".join(parts[3:4]), is_control=True)
        named = headers.get("x-graft-session", "")
        if parts[0] == "s" and len(parts) > 1:
            named, parts = parts[1], parts[2:]
        return cls(named, "/" + "/".join(parts))


def dialect_of(place: Place, headers: Mapping[str, str]) -> Dialect:
    """The dialect of a path; of one that several have, that of the client."""
    for one in DIALECTS.values():
        if place.api_path.removesuffix("/count_tokens") == one.PATH:
            return one
    return anthropic if "anthropic-version" in headers else openai_chat


class GatewayRules(Rules):
    """Each path needs the key of its session, or the gateway's token; refusals are those of a dialect."""

    KINDS = {401: "authentication", 403: "permission", 404: "not_found", 413: "too_large"}

    def __init__(self, token: str, address: Sequence[Any], find: Find) -> None:
        super().__init__(token, address, "", ("GET", "HEAD", "POST"))
        self.find = find

    def stranger(
        self, path: str, headers: Mapping[str, str], tokens: Sequence[str]
    ) -> Refused | None:
        place = Place.of(path, headers)
        if place.path == "/" and not place.is_control:  # clients look whether anything is there
            return None
        shown = shown_keys(headers)
        if any(map(self.is_token, (*shown, *tokens))):
            return None
        if place.is_control and not place.session:  # a session's key opens no other
            return (
                401,
                "opening a session takes the token of this gateway, as a bearer's or as x-api-key",
            )
        session = session_of(place, shown, self.find)
        if session is None or not any(
            equal_secrets(one, session.key) for one in (place.session, *shown)
        ):
            return 401, (
                "no API key of an open session (it may have ended): send it as a bearer's token or as "
                "x-api-key, or put it into the path, /s/KEY/v1/..."
            )
        return None

    def written(self, refused: Refused, path: str, headers: Mapping[str, str]) -> tuple[str, bytes]:
        status, text = refused
        dialect = dialect_of(Place.of(path, headers), headers)
        error = RefusedRequest(text, self.KINDS.get(status, "invalid"))
        return "application/json", to_json(dialect.error(error)[1])


def shown_keys(headers: Mapping[str, str]) -> list[str]:
    """The secrets that a request shows in its headers."""
    return [*bearer_tokens(headers), *filter(None, [headers.get("x-api-key", "").strip()])]


def session_of(place: Place, shown: Sequence[str], find: Find) -> AgentSession | None:
    """The session that a request names, or whose key it shows."""
    if place.session:
        return find(place.session)
    found = ((key, find(key)) for key in shown)
    return next((one for key, one in found if one and equal_secrets(key, one.key)), None)


class Caller(NamedTuple):
    """One request on its way through the app."""

    method: str
    place: Place
    headers: Mapping[str, str]
    receive: Any
    send: Send
    watch: Callable[[Callable[[], Any] | None], None]
    """Sets what is called if the client closes the connection."""

    async def body(self) -> Mapping[str, Any]:
        """The JSON object that was sent; an empty body is an empty object."""
        message = await self.receive()  # the guard hands over the body as a whole
        raw = message.get("body", b"")
        if (coding := self.headers.get("content-encoding", "identity")) != "identity":
            raise RefusedRequest(f"content-encoding {shown(coding)} is not read; send plain JSON")
        try:
            read = from_json(raw) if raw.strip() else {}
        except ValueError as error:
            raise RefusedRequest(f"the body is not JSON: {error}") from error
        if not isinstance(read, dict):
            raise RefusedRequest(f"the body must be a JSON object, not {shown(read)}")
        return read

    async def reply(self, status: int, content: Any) -> None:
        """One whole answer as JSON; bytes are JSON already."""
        body = content if isinstance(content, bytes) else to_json(content)
        await self.begin(status, b"application/json", length=len(body))
        await self.send({"type": "http.response.body", "body": body})

    async def begin(self, status: int, kind: bytes, length: int | None = None) -> None:
        headers = [(b"content-type", kind)]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, events: bytes, more: bool = True) -> None:
        await self.send({"type": "http.response.body", "body": events, "more_body": more})


class EventStream:
    """A streamed answer that begins when it takes longer than FIRST_SECONDS, and is kept open with pings."""

    def __init__(self, caller: Caller, dialect: Dialect) -> None:
        self.caller, self.dialect = caller, dialect
        self.has_begun = False
        self._pings: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(FIRST_SECONDS, self._start)

    def _start(self) -> None:
        self._pings = asyncio.ensure_future(self._ping())

    async def _ping(self) -> None:
        await self.begin()
        while True:
            await self.caller.write(self.dialect.ping())
            await asyncio.sleep(PING_SECONDS)

    async def begin(self) -> None:
        if not self.has_begun:
            await self.caller.begin(200, STREAM)
            self.has_begun = True

    async def stop(self) -> None:
        """No more pings."""
        self._timer.cancel()
        if self._pings is not None:
            self._pings.cancel()
            await asyncio.gather(self._pings, return_exceptions=True)


class GatewayApp:
    """The ASGI application behind the guard, which has checked that the caller may ask.

    model   the name under which the policy is listed
    """

    def __init__(self, find: Find, token: str, model: str = "policy") -> None:
        self.find, self.token, self.model = find, token, model
        self.source: SessionSource | None = None
        """Opens sessions for clients; None: they belong to a run, which opens them."""
        self.faults: dict[str, Exception] = {}
        """By session: what broke inside the gateway while it answered."""
        self.stores: WeakKeyDictionary[AgentSession, ResponseStore] = WeakKeyDictionary()
        """Of OpenAI's Responses, which requests may continue by their id."""

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        headers = scope["named_headers"]
        place = Place.of(scope["path"], headers)
        watch = scope["state"]["connection"].watch
        caller = Caller(scope["method"], place, headers, receive, send, watch)
        path, dialect = place.api_path, dialect_of(place, headers)
        try:
            if place.is_control:
                await self._control(caller)
            elif path == anthropic.COUNT_PATH and caller.method == "POST":
                request = anthropic.read_count(await caller.body(), headers)
                count = self._session(caller).count_tokens(request)
                await caller.reply(200, anthropic.counted(count))
            elif path == dialect.PATH and caller.method == "POST":
                await self._call(caller, dialect)
            elif path == "/v1/models" and caller.method == "GET":
                await caller.reply(200, dialect.models([self.model]))
            elif path.startswith("/v1/models/") and caller.method == "GET":
                name = path.removeprefix("/v1/models/")  # any name is the policy's
                await caller.reply(200, dialect.models([name])["data"][0])
            elif place.path == "/":  # a client looks whether anything is there
                await caller.reply(200, {} if caller.method == "GET" else b"")
            else:
                raise RefusedRequest(f"{caller.method} {place.path} is not served", "not_found")
        except RefusedRequest as refused:
            await caller.reply(*dialect.error(refused))

    def _session(self, caller: Caller) -> AgentSession:
        session = session_of(caller.place, shown_keys(caller.headers), self.find)
        if session is None:
            named = caller.place.session or "with this API key"
            raise RefusedRequest(f"no open session {named}; it may have ended", "not_found")
        return session

    # --- sessions -----------------------------------------------------------------------------------

    async def _control(self, caller: Caller) -> None:
        name, what = caller.place.session, caller.place.path
        if not name and caller.method == "POST":
            return await self._open(caller, await caller.body())
        session = self._session(caller)
        if what == "episode" and caller.method == "GET":
            return await caller.reply(200, session.forest.episode().dumps().encode())
        if caller.method != "POST" or what not in ("reward", "end"):
            raise RefusedRequest(f"a session has reward, end and episode, not {what}", "not_found")
        body = await caller.body()
        if what == "reward":
            self._reward(session, body.get("value"), "value", body.get("response_id"))
            return await caller.reply(200, {"id": session.id})
        if body.get("reward") is not None:
            self._reward(session, body["reward"], "reward", None)
        status = _status(body.get("status", "done"))
        if self.source is not None:
            status = await self.source.end(session, status)
        else:
            raise RefusedRequest("the run that started this session ends it, with its agent")
        await caller.reply(200, {"id": session.id, "status": status})

    async def _open(self, caller: Caller, body: Mapping[str, Any]) -> None:
        if self.source is None:
            raise RefusedRequest("the run opens its sessions itself and starts the agents")
        given, metadata = body.get("task"), body.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise RefusedRequest("metadata must be a JSON object", param="metadata")
        session = await self.source.open(None if given is None else _task(given), metadata)
        # the name by which the client reaches this server, which the guard has checked
        url = f"http://{caller.headers['host']}/s/{session.id}"
        await caller.reply(
            200,
            {
                "id": session.id,
                "key": session.key,
                "base_url": url,
                "openai_base_url": f"{url}/v1",
                "anthropic_base_url": url,
                "task": session.forest.task.to_json(),
            },
        )

    def _reward(self, session: AgentSession, value: Any, name: str, answer: Any) -> None:
        if answer is not None and not isinstance(answer, str):
            raise RefusedRequest("response_id must be a text", param="response_id")
        try:
            number = as_number(value, "the reward")
        except UserCodeError as error:
            why = f"{name} must be a finite number, not {shown(value)}"
            raise RefusedRequest(why, param=name) from error
        session.reward(number, None if answer is None else answer_id(answer))

    # --- calls of the policy ------------------------------------------------------------------------

    async def _call(self, caller: Caller, dialect: Dialect) -> None:
        session, body = self._session(caller), await caller.body()
        store = None
        if dialect is openai_responses:
            store = self.stores.setdefault(session, ResponseStore())
        request = dialect.read(body if store is None else store.resolve(body), caller.headers)
        stream = EventStream(caller, dialect) if request.stream else None
        try:
            answers = await self._while_connected(caller, self._sample(session, request))
            if answers is None:
                return None
            if store is not None:
                store.keep(body, dialect.answer(request, answers))
            if stream is None:
                return await caller.reply(200, dialect.answer(request, answers))
            await stream.stop()
            await stream.begin()
            events = [dialect.opening(request, answers[0].id), *dialect.events(request, answers)]
            await caller.write(b"".join(events), more=False)
        except RefusedRequest as refused:
            if stream is not None:
                await stream.stop()
            if stream is None or not stream.has_begun:
                raise
            await caller.write(dialect.error_event(refused), more=False)
        finally:
            if stream is not None:
                await stream.stop()

    async def _while_connected(self, caller: Caller, asked: Awaitable[Answers]) -> Answers | None:
        """The answers; None, and the sample is given up, when the client closes the connection."""
        task, is_gone = asyncio.current_task(), False
        assert task is not None

        def leave() -> None:
            nonlocal is_gone
            is_gone = True
            task.cancel()

        caller.watch(leave)
        try:
            return await asked
        except asyncio.CancelledError:
            if not is_gone:
                raise  # the server ends
            task.uncancel()
            return None
        finally:
            caller.watch(None)

    async def _sample(self, session: AgentSession, request: AgentRequest) -> Answers:
        try:
            return await session.answer(request)
        except RefusedRequest:
            raise
        except Exception as error:  # ours: the client gets its status, the run the exception
            self.faults.setdefault(session.id, error)
            print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
            raise RefusedRequest(f"{type(error).__name__}: {error}", "internal") from error


def _status(given: Any) -> Status:
    allowed = ("done", "truncated", "env_error", "tool_error", "aborted")
    if given not in allowed:
        raise RefusedRequest(f"status {given!r} is not one of {', '.join(allowed)}", param="status")
    return Status(given)


def _task(given: Any) -> Task:
    """A task that a client brings: {"id": ..., "prompt": messages or a text, "answer": ...}."""
    if not isinstance(given, dict) or not isinstance(given.get("id"), str) or not given["id"]:
        raise RefusedRequest('task must be an object with an "id", a text', param="task")
    prompt, meta = given.get("prompt", ()), given.get("meta") or {}
    if isinstance(prompt, str):
        prompt = ({"role": "user", "content": prompt},)
    is_list = isinstance(prompt, list | tuple) and all(isinstance(one, dict) for one in prompt)
    if not is_list or not isinstance(meta, dict):
        raise RefusedRequest(
            "task.prompt must be messages or a text, task.meta an object", param="task"
        )
    known = {"id": given["id"], "env": str(given.get("env", "gateway")), "prompt": prompt}
    return Task.from_json({**known, "answer": given.get("answer"), "meta": meta})
