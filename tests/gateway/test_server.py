"""The address: who is answered, three dialects over HTTP, sessions, streams, dropped connections."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from graft.gateway.address import GatewayAddress
from graft.gateway.dialects.dialect import answer_id
from graft.gateway.http import caller
from graft.gateway.http.rules import GatewayRules
from graft.types import Episode, Sampling, Status, Task
from tests.gateway.tiny import TASK, asks, tiny_gateway

pytest.importorskip("uvicorn")

HELLO = {"model": "policy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


def served(**settings: Any) -> Callable[[Callable[..., Awaitable[Any]]], Callable[..., Any]]:
    """Runs a test of (address, gateway, client, ...) while a tiny policy is served; pytest fills the rest."""

    def decorate(work: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        async def serve(given: dict[str, Any]) -> Any:
            gateway, address = tiny_gateway(**settings), GatewayAddress()
            async with address.serving(gateway), httpx.AsyncClient(base_url=address.url) as client:
                try:
                    return await work(address, gateway, client, **given)
                finally:
                    for session in gateway.sessions:
                        session.end()
                        session.forest.close()
                    gateway.policy.engine.close()

        def test(**given: Any) -> None:
            asyncio.run(serve(given))

        _, _, _, *others = inspect.signature(work).parameters.values()
        test.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        test.__name__, test.__doc__ = work.__name__, work.__doc__
        return test

    return decorate


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@served()
async def test_a_session_is_named_by_its_path_its_key_or_a_header(address, gateway, client):
    session = gateway.open(TASK)
    other = gateway.open(TASK)
    ask = [
        ("/v1/chat/completions", bearer(session.key)),
        (f"/s/{session.id}/v1/chat/completions", bearer(session.key)),
        (f"/s/{session.key}/v1/chat/completions", {}),
        (f"/s/{session.id}/chat/completions", {"x-api-key": session.key}),
        ("/v1/chat/completions", {**bearer(session.key), "x-graft-session": session.id}),
        (f"/s/{session.id}/v1/chat/completions", bearer(address.token)),
    ]
    for path, headers in ask:
        reply = await client.post(path, json=HELLO, headers=headers)
        assert reply.status_code == 200, (path, reply.text)
        assert reply.json()["choices"][0]["message"]["role"] == "assistant"
    assert session.counts["calls"] == 6 and session.counts["retries"] == 5
    for path, headers, status in [
        ("/v1/chat/completions", {}, 401),
        ("/v1/chat/completions", bearer("wrong"), 401),
        ("/v1/chat/completions", bearer(session.id), 401),  # the id is no secret
        (f"/s/{session.id}/v1/chat/completions", bearer(other.key), 401),
        (f"/s/{session.id}/v1/chat/completions", {}, 401),
        ("/v1/chat/completions", bearer(address.token), 404),  # of no session
        (f"/s/{session.id}/v1/embeddings", bearer(session.key), 404),
    ]:
        reply = await client.post(path, json=HELLO, headers=headers)
        assert reply.status_code == status, (path, headers, reply.text)
    assert (await client.head("/")).status_code == 200
    assert (await client.get("/v1/models")).status_code == 401
    models = await client.get("/v1/models", headers=bearer(session.key))
    assert models.json()["data"][0]["id"] == "policy"
    for name in ("policy", "gpt-4o", "openai/policy"):  # any name is the policy's
        model = await client.get(f"/v1/models/{name}", headers=bearer(session.key))
        assert model.json()["id"] == name
    reply = await client.post(
        f"/graft/sessions/{session.id}/reward", json={"value": "x"}, headers=bearer(session.key)
    )
    said = reply.json()["error"]
    assert (
        said["param"] == "value" and "the text 'x'; it must be a finite number" in said["message"]
    )
    foreign = await client.get("/v1/models", headers={"host": "evil.example"})
    assert foreign.status_code == 403


@served()
async def test_who_may_not_ask_reads_why_in_the_form_of_their_dialect(address, gateway, client):
    claude = {"anthropic-version": "2023-06-01"}
    for path, headers, status, kind in [
        ("/v1/chat/completions", {}, 401, "invalid_request_error"),
        ("/s/gone/v1/responses", {}, 401, "invalid_request_error"),
        ("/v1/messages", {}, 401, "authentication_error"),
        ("/s/gone/v1/messages/count_tokens", {}, 401, "authentication_error"),
        ("/v1/models", claude, 401, "authentication_error"),
        ("/graft/sessions", {}, 401, "invalid_request_error"),
        ("/v1/messages", {"host": "evil.example"}, 403, "permission_error"),
        ("/v1/%2e%2e", {}, 404, "invalid_request_error"),
    ]:
        reply = await client.post(path, content=b"{}", headers=headers)
        assert (reply.status_code, reply.headers["content-type"]) == (
            status,
            "application/json",
        )
        body = reply.json()
        assert body["error"]["type"] == kind and body["error"]["message"]
        is_claude = "messages" in path or bool(headers.get("anthropic-version"))
        assert body.get("type") == ("error" if is_claude else None)
    ended = (await client.post("/v1/messages", content=b"{}")).json()["error"]["message"]
    assert "it may have ended" in ended
    rules = GatewayRules("", ("127.0.0.1", 80), address.find)
    kind, large = rules.written((413, "too long"), "/v1/messages", {})
    assert kind == "application/json" and b'"request_too_large"' in large
    wrong = await client.put("/v1/messages", content=b"{}")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD, POST, DELETE")


@served()
async def test_log_probs_can_be_asked_for_after_the_same_request_without_them(
    address, gateway, client
):
    headers = bearer(gateway.open(TASK).key)
    for body in (HELLO, {**HELLO, "logprobs": True}):
        reply = await client.post("/v1/chat/completions", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    assert len(choice["logprobs"]["content"]) == reply.json()["usage"]["completion_tokens"]


@served()
async def test_bad_bodies_are_refused_in_the_dialects_own_form(address, gateway, client):
    headers = bearer(gateway.open(TASK).key)
    reply = await client.post("/v1/chat/completions", content=b"{", headers=headers)
    assert reply.status_code == 400 and "not JSON" in reply.json()["error"]["message"]
    reply = await client.post("/v1/messages", content=b"[1]", headers=headers)
    assert reply.status_code == 400 and reply.json()["type"] == "error"
    for body, more, why in [
        (b"[1]", {}, "must be a JSON object, not [1]"),
        (b"null", {}, "must be a JSON object, not None"),
        (b"\x1f\x8b", {"content-encoding": "gzip"}, "'gzip' is not read; send plain JSON"),
        (
            b'{"messages": [{"role": "user", "content": 5}]}',
            {},
            "a text or a list of parts, not 5",
        ),
    ]:
        sent = {**headers, **more}
        reply = await client.post("/v1/chat/completions", content=body, headers=sent)
        assert reply.status_code == 400 and why in reply.json()["error"]["message"]
    long = {**HELLO, "messages": [{"role": "user", "content": "x" * 5000}]}
    reply = await client.post("/v1/chat/completions", json=long, headers=headers)
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    streamed = await client.post("/v1/messages", json={**long, "stream": True}, headers=headers)
    assert streamed.status_code == 400  # refused at once: a status, not an event of a stream
    assert "prompt is too long" in streamed.json()["error"]["message"]


@served()
async def test_anthropic_counts_tokens_and_streams(address, gateway, client):
    session = gateway.open(TASK)
    headers = {"x-api-key": session.key, "anthropic-version": "2023-06-01"}
    count = await client.post("/v1/messages/count_tokens", json=HELLO, headers=headers)
    whole = await client.post("/v1/messages?beta=true", json=HELLO, headers=headers)
    assert count.json()["input_tokens"] == whole.json()["usage"]["input_tokens"]
    reply = await client.post("/v1/messages", json={**HELLO, "stream": True}, headers=headers)
    names = [line[7:] for line in reply.text.splitlines() if line.startswith("event: ")]
    assert names[0] == "message_start" and names[-1] == "message_stop"
    models = await client.get("/v1/models", headers=headers)
    assert models.json()["data"][0]["type"] == "model"


@served()
async def test_responses_continue_each_other_by_id(address, gateway, client):
    session, other = gateway.open(TASK), gateway.open(TASK)
    body = {"model": "policy", "input": "hello"}
    first = await client.post("/v1/responses", json=body, headers=bearer(session.key))
    assert first.status_code == 200, first.text
    body = {**body, "input": "and?", "previous_response_id": first.json()["id"]}
    for stream in (False, True):
        asked = {**body, "stream": stream}
        reply = await client.post("/v1/responses", json=asked, headers=bearer(session.key))
        assert reply.status_code == 200 and "response" in reply.text
    assert (session.counts["roots/first"], session.counts["retries"]) == (1, 1)
    assert len(session.contexts) == 1  # the second continued the first, token by token
    foreign = await client.post("/v1/responses", json=body, headers=bearer(other.key))
    assert foreign.status_code in (400, 404)


@served()
async def test_a_stream_is_pinged_while_the_policy_samples(
    address, gateway, client, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(caller, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(caller, "PING_SECONDS", 0.01)
    session = gateway.open(TASK)
    answer = session.answer

    async def late(request: Any) -> Any:
        await asyncio.sleep(0.1)
        return await answer(request)

    monkeypatch.setattr(session, "answer", late)
    body = {**HELLO, "stream": True}
    reply = await client.post("/v1/chat/completions", json=body, headers=bearer(session.key))
    assert reply.text.count(": ping") >= 3
    events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[0])["choices"][0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize("stream", [False, True])
@served(sampling=Sampling(max_tokens=3000))
async def test_a_dropped_connection_ends_its_sample(address, gateway, client, stream: bool):
    session = gateway.open(TASK)
    body = {**HELLO, "max_tokens": 3000, "stream": stream}
    asked = asyncio.ensure_future(
        client.post("/v1/chat/completions", json=body, headers=bearer(session.key))
    )
    while not gateway.policy.engine.stats["decode_tokens"]:
        await asyncio.sleep(0.01)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    for _ in range(200):
        if session.counts["dropped"]:
            break
        await asyncio.sleep(0.01)
    assert session.counts["dropped"] == 1
    leaf = session.end()
    spans = session.forest.episode().spans
    assert not any(any(span.mask) for span in spans) and leaf.metrics["turns"] == 0


@served()
async def test_rewards_of_answers_and_of_the_attempt_and_the_episode(address, gateway, client):
    session = gateway.open(TASK)
    key = bearer(session.key)
    reply = (await client.post("/v1/chat/completions", json=HELLO, headers=key)).json()
    at = f"/graft/sessions/{session.id}"
    for body in ({"value": 0.25, "response_id": reply["id"]}, {"value": 0.5}):
        assert (await client.post(f"{at}/reward", json=body, headers=key)).status_code == 200
    for body in (
        {"value": "much"},
        {"value": None},
        {"value": 1, "response_id": "chatcmpl-none"},
        {"value": 1, "response_id": 3},
    ):
        refused = await client.post(f"{at}/reward", json=body, headers=key)
        assert refused.status_code in (400, 404), refused.text
    infinite = await client.post(f"{at}/reward", content=b'{"value": Infinity}', headers=key)
    assert infinite.status_code == 400
    assert session.total == 0.75
    assert session.status_at_end(Status.DONE)[0] is Status.ENV_ERROR  # what it earned is not known
    episode = (await client.get(f"{at}/episode", headers=key)).json()
    assert [span["author"] for span in episode["spans"]] == ["task", "policy"]
    refused = await client.post(f"{at}/end", headers=key)
    assert refused.status_code == 400 and "ends it" in refused.text  # the run's own
    assert (await client.post("/graft/sessions", json={}, headers=key)).status_code == 401
    refused = await client.post("/graft/sessions", json={}, headers=bearer(address.token))
    assert refused.status_code == 400


@served()
async def test_an_attempt_sees_neither_the_answer_nor_other_attempts(address, gateway, client):
    task = Task("t", "none", ({"role": "user", "content": "?"},), answer="GOLD", seed=77)
    task = replace(task, meta={"tests": "GOLD"}, data_source="set")
    forest = gateway.forest(task)
    other, mine, silent = (gateway.open(task, forest=forest, number=n) for n in range(3))
    for session in (other, mine):
        ask = {**HELLO, "seed": session.number}
        reply = await client.post("/v1/chat/completions", json=ask, headers=bearer(session.key))
        session.reward(0.125 * (2 + session.number), answer_id(reply.json()["id"]))
    silent.end(Status.ENV_ERROR)
    forest.roots[0].span.info["error"] = "the program of another attempt said SECRET"
    at = f"/graft/sessions/{mine.id}/episode"
    text = (await client.get(at, headers=bearer(mine.key))).text
    seen = Episode.loads(text)
    assert (seen.task.prompt, seen.task.data_source) == (task.prompt, "set")
    assert (seen.task.answer, seen.task.meta, seen.task.seed) == (None, {}, 0)
    assert "GOLD" not in text and "SECRET" not in text and not seen.leaves
    assert [(one.author, one.reward) for one in seen.spans] == [("task", 0), ("policy", 0.375)]
    assert seen.spans[1].tokens == [*mine.record[0].done.answer.tokens]
    refused = await client.get(at, headers=bearer(other.key))
    assert refused.status_code == 401
    whole = Episode.loads((await client.get(at, headers=bearer(address.token))).text)
    assert whole.task == task and len(whole.spans) == 3  # whoever runs the gateway sees all


async def test_a_fork_does_not_see_the_rewards_of_the_attempt_that_it_repeats(gateway, session):
    (answer,) = await session.answer(asks("hello"))
    session.reward(0.5, answer.id)
    fork = gateway.open(TASK, forest=session.forest, number=1, replay=session.record)
    await fork.answer(asks("hello"))
    assert [span.reward for span in fork.episode().spans] == [0.0, 0.0]
    assert [span.reward for span in session.episode().spans] == [0.0, 0.5]


@pytest.mark.parametrize(
    "values", [[1e308, 1e308], [9e11, 9e11], [1e13], [float("nan")], [10**400]]
)
@served()
async def test_rewards_that_no_sum_can_hold_are_refused_and_fail_the_attempt(
    address, gateway, client, values: list[float]
):
    session = gateway.open(TASK)
    await client.post("/v1/chat/completions", json=HELLO, headers=bearer(session.key))
    at = f"/graft/sessions/{session.id}/reward"
    for value in values:
        body = json.dumps({"value": value}).encode()
        reply = await client.post(at, content=body, headers=bearer(session.key))
    assert reply.status_code == 400
    leaf = session.end()
    assert leaf.status is Status.ENV_ERROR and "it must be" in leaf.info["error"]
    assert math.isfinite(leaf.reward)


@served()
async def test_a_fault_inside_the_gateway_fails_the_attempt_that_provoked_it(
    address, gateway, client, monkeypatch: pytest.MonkeyPatch
):
    session = gateway.open(TASK)
    monkeypatch.setattr(session.history, "prompt", lambda *given: 1 / 0)
    headers = bearer(session.key)
    reply = await client.post("/v1/chat/completions", json=HELLO, headers=headers)
    assert reply.status_code == 500 and "ZeroDivisionError" in reply.text
    leaf = session.end()
    assert leaf.status is Status.ENV_ERROR and "ZeroDivisionError" in leaf.info["error"]


@served(template="{% for m in messages %}{{ m.content }}{% endfor %}")
async def test_a_template_that_writes_nothing_is_refused(address, gateway, client):
    session = gateway.open(TASK)
    for text in ("", None):
        body = {**HELLO, "messages": [{"role": "user", "content": text}]}
        reply = await client.post("/v1/chat/completions", json=body, headers=bearer(session.key))
        assert reply.status_code == 400 and "no text" in reply.json()["error"]["message"]


def test_the_address_stays_between_event_loops_and_requests_wait_in_its_queue():
    gateway, address = tiny_gateway(), GatewayAddress()
    session = gateway.open(TASK)
    url = address.url
    with socket.create_connection(("127.0.0.1", address.listener.getsockname()[1])) as early:
        body = json.dumps(HELLO).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {url[7:]}\r\nContent-Length: {len(body)}\r\n"
            f"Authorization: Bearer {session.key}\r\n\r\n"
        )
        early.sendall(head.encode() + body)  # nothing is served yet

        async def step() -> bytes:
            async with address.serving(gateway), address.serving(gateway):
                early.setblocking(False)
                loop = asyncio.get_running_loop()
                if first := not session.counts["calls"]:
                    return await loop.sock_recv(early, 65536)
                async with httpx.AsyncClient(base_url=url) as client:
                    headers = bearer(session.key)
                    reply = await client.post("/v1/chat/completions", json=HELLO, headers=headers)
                    return reply.content if not first else b""

        first, second = asyncio.run(step()), asyncio.run(step())
    assert first.startswith(b"HTTP/1.1 200") and address.url == url
    assert json.loads(second)["choices"] == json.loads(first.partition(b"\r\n\r\n")[2])["choices"]
    session.end()
    session.forest.close()
    gateway.policy.engine.close()
    address.close()
