"""The HTTP side of the gateway: three dialects of model providers, and sessions.

    POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens,
         /v1/embeddings
    GET  /v1/models, /v1/responses/ID; DELETE /v1/responses/ID
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
import json
import logging
import traceback
from collections.abc import Awaitable, Mapping
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from graft.envs.checked import why_no_message
from graft.gateway.dialects import anthropic, openai_responses
from graft.gateway.dialects.dialect import Dialect, answer_id
from graft.gateway.dialects.response_store import ResponseStore
from graft.gateway.http.caller import Caller, EventStream
from graft.gateway.http.rules import Find, Place, dialect_of, session_of, shown_keys
from graft.gateway.request import AgentRequest, PolicyAnswer, RefusedRequest
from graft.gateway.session import AgentSession
from graft.gateway.speakers.endpoint import ModelEndpoint
from graft.serving.guard import Scope, Send, equal_secrets
from graft.types import Status, Task
from graft.user_code import UserCodeError, describe_error

Answers = list[PolicyAnswer]
T = TypeVar("T")
EMBEDDINGS_PATH = "/v1/embeddings"
log = logging.getLogger("graft")


class SessionSource(Protocol):
    """Opens the sessions that clients ask for over HTTP, and learns when they end."""

    async def open(self, task: Task | None, metadata: Mapping[str, Any]) -> AgentSession: ...
    async def end(self, session: AgentSession, status: Status) -> Status:
        """End a session; the status that it gets."""
        ...

    def release(self) -> None: ...


class GatewayApp:
    """The ASGI application behind the guard, which has checked that the caller may ask.

    model   the name under which the policy is listed
    """

    def __init__(self, find: Find, token: str, model: str = "policy") -> None:
        self.find, self.token, self.model = find, token, model
        self.source: SessionSource | None = None
        """Opens sessions for clients; None: they belong to a run, which opens them."""
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
                await self._count(caller)
            elif path == dialect.PATH and caller.method == "POST":
                await self._call(caller, dialect)
            elif path.startswith(f"{openai_responses.PATH}/") and caller.method != "POST":
                await self._response(caller, path.removeprefix(f"{openai_responses.PATH}/"))
            elif path == EMBEDDINGS_PATH and caller.method == "POST":
                await self._embed(caller)
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

    async def _control(self, caller: Caller) -> None:
        name, what = caller.place.session, caller.place.path
        if not name and caller.method == "POST":
            return await self._open(caller, await caller.body())
        session = self._session(caller)
        if what == "episode" and caller.method == "GET":
            is_whole = any(equal_secrets(one, self.token) for one in shown_keys(caller.headers))
            episode = session.forest.episode() if is_whole else session.episode()
            return await caller.reply(200, episode.dumps().encode())
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
        for name, value in (("task", given), ("metadata", metadata)):
            try:
                json.dumps(value, allow_nan=False)
            except ValueError as error:  # the log of episodes could not be written
                raise RefusedRequest(f"{name} is not JSON: {error}", param=name) from error
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
            session.reward(value, None if answer is None else answer_id(answer))
        except UserCodeError as error:
            raise RefusedRequest(f"{name}: {error}; the attempt fails", param=name) from error

    async def _count(self, caller: Caller) -> None:
        session, body = self._session(caller), await caller.body()
        speaker = session.speaker(named_model(body))
        if isinstance(speaker, ModelEndpoint):
            answer = await speaker.send(caller.place.api_path, body, caller.headers)
            return await caller.reply(200, answer)
        count = await speaker.count_tokens(anthropic.read_count(body, caller.headers))
        await caller.reply(200, anthropic.counted(count))

    async def _response(self, caller: Caller, id: str) -> None:
        """Show or forget a response that is kept."""
        store = self.stores.setdefault(self._session(caller), ResponseStore())
        await caller.reply(200, store.delete(id) if caller.method == "DELETE" else store.get(id))

    async def _embed(self, caller: Caller) -> None:
        session, body = self._session(caller), await caller.body()
        endpoint = session.policy.routes.embeddings
        if endpoint is None:
            raise RefusedRequest(
                "the policy writes texts and embeds none; name a server that does: "
                'agent.embeddings={endpoint: "http://host:8001/v1"}',
                "not_found",
            )
        session.counts["embeddings"] += 1
        await caller.reply(200, await endpoint.send(EMBEDDINGS_PATH, body, caller.headers))

    async def _pass(
        self, caller: Caller, dialect: Dialect, endpoint: ModelEndpoint, body: Mapping[str, Any]
    ) -> None:
        """Pass a call on to an endpoint, and its answer back as it is."""
        sent = endpoint.send(dialect.PATH, body, caller.headers)
        if body.get("stream") is not True:
            answer = await self._while_connected(caller, sent)
            return None if answer is None else await caller.reply(200, answer)
        stream = EventStream(caller, dialect)
        try:
            answer = await self._while_connected(caller, sent)
            if answer is not None:
                await stream.stop()
                await stream.begin()
                await caller.write(answer, more=False)
        except RefusedRequest as refused:
            await stream.stop()
            if not stream.has_begun:
                raise
            await caller.write(dialect.error_event(refused), more=False)
        finally:
            await stream.stop()

    async def _call(self, caller: Caller, dialect: Dialect) -> None:
        session, body = self._session(caller), await caller.body()
        speaker = session.speaker(named_model(body))
        if isinstance(speaker, ModelEndpoint):
            return await self._pass(caller, dialect, speaker, body)
        store = None
        if dialect is openai_responses:
            store = self.stores.setdefault(session, ResponseStore())
        try:
            request = dialect.read(body if store is None else store.resolve(body), caller.headers)
        except RefusedRequest as refused:
            session.refuse(refused)
            raise
        stream = EventStream(caller, dialect) if request.stream else None
        try:
            answers = await self._while_connected(caller, self._sample(session, speaker, request))
            if answers is None:
                return None
            session.refusal = ""
            if store is not None:
                store.keep(body, dialect.answer(request, answers))
            if stream is None:
                return await caller.reply(200, dialect.answer(request, answers))
            await stream.stop()
            await stream.begin()
            events = [dialect.opening(request, answers[0].id), *dialect.events(request, answers)]
            await caller.write(b"".join(events), more=False)
        except RefusedRequest as refused:
            session.refuse(refused)
            if stream is not None:
                await stream.stop()
            if stream is None or not stream.has_begun:
                raise
            await caller.write(dialect.error_event(refused), more=False)
        finally:
            if stream is not None:
                await stream.stop()

    async def _while_connected(self, caller: Caller, asked: Awaitable[T]) -> T | None:
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

    async def _sample(
        self, session: AgentSession, speaker: AgentSession, request: AgentRequest
    ) -> Answers:
        try:
            return await speaker.answer(request)
        except RefusedRequest:
            session.fault = speaker.fault or session.fault
            raise
        except (
            Exception
        ) as error:  # ours; a request that provokes it costs its attempt, not the run
            why = f"the gateway could not answer: {describe_error(error)}"
            session.fault = Status.ENV_ERROR, why
            log.error("%s", "".join(traceback.format_exception(error)))
            raise RefusedRequest(why, "internal") from error


def named_model(body: Mapping[str, Any]) -> str:
    """The name of the model that a request asks for; "" if it is no text, which the dialect refuses."""
    name = body.get("model")
    return name if isinstance(name, str) else ""


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
    env = given.get("env", "gateway")
    if (
        not isinstance(prompt, list | tuple)
        or not isinstance(meta, dict)
        or not isinstance(env, str)
    ):
        raise RefusedRequest(
            "task.prompt must be messages or a text, task.meta an object, task.env a text",
            param="task",
        )
    for number, message in enumerate(prompt):
        if why := why_no_message(message):
            raise RefusedRequest(f"task.prompt[{number}] is no message: {why}", param="task")
    known = {"id": given["id"], "env": env, "prompt": prompt}
    return Task.from_json({**known, "answer": given.get("answer"), "meta": meta})
